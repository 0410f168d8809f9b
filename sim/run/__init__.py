"""A run, from its options to its files: prepared, put together, carried out, written."""
