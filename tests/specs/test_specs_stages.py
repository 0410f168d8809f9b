"""Layers of a pipeline's stages, as vLLM puts them there."""

import pytest

from sim.errors import UserError
from sim.specs.stages import partitioned


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (32, 4, (8, 8, 8, 8)),
        (61, 2, (31, 30)),
        (61, 4, (15, 15, 16, 15)),
        (62, 4, (15, 16, 16, 15)),
        (63, 4, (16, 16, 16, 15)),
        (32, 1, (32,)),
    ],
)
def test_what_is_left_over_goes_to_the_middle(layers, stages, expected):
    """As `get_pp_indices` of vLLM 0.33 says of these."""
    assert partitioned(layers, stages) == expected


def test_a_partition_that_was_asked_for_counts():
    assert partitioned(61, 3, "20,21, 20") == (20, 21, 20)


@pytest.mark.parametrize(
    ("stages", "asked", "words"),
    [
        (2, "16,x", "--pp-layer-partition 16,x: is not layers of each stage"),
        (2, "32,0", "is not layers of each stage"),
        (2, "", "is not layers of each stage"),
        (2, "10,11,11", "3 stages of 32 layers in all; the model has 32 on 2"),
        (2, "16,17", "2 stages of 33 layers in all; the model has 32 on 2"),
        (40, None, "--pipeline-parallel-size 40: the model has 32 layers"),
    ],
)
def test_what_is_no_partition_is_refused(stages, asked, words):
    with pytest.raises(UserError, match=words):
        partitioned(32, stages, asked)
