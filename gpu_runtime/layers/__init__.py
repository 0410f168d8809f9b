"""Passes over the layers: what a plan computes of which sequences, and what layers bring and save on the way."""
