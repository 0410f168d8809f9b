"""OpenAI's API over the live engine."""
