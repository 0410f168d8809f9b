"""Requests: readers, writers, transforms and generators of LLM-serving traces, and a catalogue of public ones."""
