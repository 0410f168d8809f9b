"""The simulator: specs, cost model, block state, policies and engine, and the SimPy clock that drives them."""
