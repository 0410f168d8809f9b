"""Examples are the same in every run; `make fuzz` (`--hypothesis-profile=random`) draws others each time.

They may take as long as a busy machine makes them: tests run beside each other.
"""

from hypothesis import settings

settings.register_profile("random", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.load_profile("same")
