"""Constants of cost models: measured or imported samples, fits to them, and the fitted `profiles/`."""
