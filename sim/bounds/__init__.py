"""What no scheduler can exceed: the certified goodput bound, and runs with one limit of the machine lifted."""
