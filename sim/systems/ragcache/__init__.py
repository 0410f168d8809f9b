"""RAGCache: the preset, and the order of its queue."""
