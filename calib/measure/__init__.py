"""Measuring: a machine's own kernels and copies, timed through torch; `calib.measure.run.calibrate` is the way in."""
