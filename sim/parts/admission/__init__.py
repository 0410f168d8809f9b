"""Whether the head of the queue may start."""
