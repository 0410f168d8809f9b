"""BatchLLM: `preset` says what it is; beside it the part that is its own."""
