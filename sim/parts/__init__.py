"""The parts that systems are assembled from: order, batching, admission, memory, eviction, stage. Contracts: `base`."""
