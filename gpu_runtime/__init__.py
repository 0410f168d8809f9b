"""The live runtime: the same engine on the real clock, its plans executed by torch."""
