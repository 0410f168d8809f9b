"""Importers: public measured tables, each turned into the samples of `calib.samples`."""
