"""The KV store: pools, memories, what they index (`index`) and what is behind the GPU (`tiers`). Contract: `memory`."""
