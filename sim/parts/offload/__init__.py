"""vLLM's OffloadingConnector: KV blocks that leave the GPU live on in the host's memory."""
