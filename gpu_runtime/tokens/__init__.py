"""Tokens: the ids that requests come with, those of their blocks, those that a device has yet to hand over."""
