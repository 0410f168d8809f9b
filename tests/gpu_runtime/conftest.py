"""One thread computes: small decoders gain nothing from more, and tests run beside each other."""

from contextlib import suppress

with suppress(ImportError):
    import torch

    torch.set_num_threads(1)
