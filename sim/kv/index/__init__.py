"""Which content is cached, by keys of blocks."""
