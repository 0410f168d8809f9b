"""Examples are the same in every run; `make fuzz` (`--hypothesis-profile=random`) draws others each time.

They may take as long as a busy machine makes them: tests run beside each other.
"""

import gc
from importlib.util import find_spec

from hypothesis import settings

settings.register_profile("random", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.load_profile("same")

# What computes with torch is tested where torch is.
NEED_TORCH = ["gpu_runtime/*", "calib/test_calib_measure_*", "specs/*_transformers.py"]
collect_ignore_glob = [] if find_spec("torch") else NEED_TORCH


def pytest_collection_finish():
    """What was imported stays to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
