"""HCache: `preset` says what it is, `options` what its parts can be told."""
