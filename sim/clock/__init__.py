"""The virtual clock: arrivals and the SimPy driver."""
