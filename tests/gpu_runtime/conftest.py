"""One thread computes: small decoders gain nothing from more, and tests run beside each other. Noise is the same."""

from contextlib import suppress

import pytest

from sim.kv.tiers.worth import Worth


@pytest.fixture
def worthwhile(monkeypatch):
    """Loads are always worth it: what they take is not the question here."""
    monkeypatch.setattr(Worth, "load_s", lambda self, num_blocks: 0.0)


with suppress(ImportError):
    import torch

    torch.set_num_threads(1)

    @pytest.fixture(autouse=True)
    def same_noise():
        torch.manual_seed(0)
