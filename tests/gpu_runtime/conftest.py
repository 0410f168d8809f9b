"""One thread computes: small decoders gain nothing from more, and tests run beside each other. Noise is the same."""

from contextlib import suppress

import pytest

with suppress(ImportError):
    import torch

    torch.set_num_threads(1)

    @pytest.fixture(autouse=True)
    def same_noise():
        torch.manual_seed(0)
