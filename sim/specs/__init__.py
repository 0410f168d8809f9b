"""What is simulated: models (bytes and FLOPs per token) and hardware (memory, rates and links)."""
