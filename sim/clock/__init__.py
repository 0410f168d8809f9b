"""The virtual clock: arrivals, and the SimPy processes that drive one engine or a cluster of them."""
