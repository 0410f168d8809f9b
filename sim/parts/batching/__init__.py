"""The shape of a step: which sequences prefill, which decode."""
