"""eLLM's token-wise caching: what a step takes with a share of all tokens uncached, and the best share and batch."""
