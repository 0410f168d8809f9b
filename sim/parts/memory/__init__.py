"""All pools, and what is where."""
