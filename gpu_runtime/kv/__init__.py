"""Paged KV memory: block ids, pools, copies between the tiers, which sequence holds what."""
