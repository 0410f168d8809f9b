"""The live runtime: the same engine on a GPU's clock (to come)."""
