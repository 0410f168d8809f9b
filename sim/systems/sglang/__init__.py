"""SGLang as it is served today: `preset` says what it is, `options` what it can be told; the rest are its own parts."""
