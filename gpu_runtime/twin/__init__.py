"""Simulated against executed: validation, its figure, and the probe of the machine's speed."""
