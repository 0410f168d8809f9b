"""The simulator: models and GPUs, prices, systems and their engine, the SimPy clock that drives them, and results."""
