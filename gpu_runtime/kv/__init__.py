"""Paged KV memory: block ids, pools, copies between the tiers, who holds what."""
