"""The decoder: configuration, weights, attention, captured graphs."""
