"""`HostedLayers`: what a prompt needs free on either side, block by block."""

import pytest

from kvtwin.testing import limits, requests
from sim.engine.sequence import Sequence
from sim.systems.kvpr.hosted_layers import HostedLayers

LAYERS, KEEP_FREE = 4, 1
SEQ = Sequence(requests((0.0, 17, 1))[0])
"""Two blocks, the second with one token."""


@pytest.mark.parametrize(
    ("gpu", "host", "fits"),
    [(8, 8, True), (7, 8, False), (8, 7, False), (9, 9, True)],
    ids=["just enough", "one less on the GPU", "one less on the host", "more"],
)
def test_a_prompt_needs_its_send_buffer_and_all_layers_on_the_host(gpu, host, fits):
    """On the GPU two layers of two blocks beside a block of each layer that is kept free; on the host four layers."""
    memory = HostedLayers(limits(gpu=100, host=100), LAYERS, lambda tokens: 0)
    memory.gpu.allocate(memory.gpu.free - gpu)
    memory.host.allocate(memory.host.free - host)
    assert memory.layers_to_keep(SEQ, KEEP_FREE) == (0 if fits else None)
    assert memory.ever_fits(SEQ, KEEP_FREE)


@pytest.mark.parametrize(("gpu", "host", "fits"), [(2, 2, True), (1, 2, False), (2, 1, False)])
def test_a_prompt_that_the_empty_tiers_cannot_hold_never_fits(gpu, host, fits):
    memory = HostedLayers(limits(gpu=gpu, host=host), LAYERS, lambda tokens: 0)
    assert memory.ever_fits(SEQ, KEEP_FREE) is fits


@pytest.mark.parametrize(("gpu", "fits"), [(3, True), (2, False)])
def test_what_is_kept_free_is_kept_of_every_layer(gpu, fits):
    """A block of the GPU is one of each layer: 12 hold two layers of two beside two of each of four, 8 do not."""
    assert HostedLayers(limits(gpu=gpu, host=8), LAYERS, lambda tokens: 0).ever_fits(SEQ, 2) is fits
