"""What a live run really did: copies, the times of its tokens, what torch did meanwhile."""
