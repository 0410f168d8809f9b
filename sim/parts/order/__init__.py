"""Which waiting request is next."""
