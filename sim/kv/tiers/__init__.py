"""The host and the disk behind the GPU: caches, copies, and vLLM's OffloadingConnector."""
