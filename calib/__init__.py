"""Fitted constants of cost models (`profiles/`); measuring and fitting follow."""
