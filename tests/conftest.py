"""Examples may take as long as a busy machine makes them: tests run beside each other."""

from hypothesis import settings

settings.register_profile("kvtwin", deadline=None)
settings.load_profile("kvtwin")
