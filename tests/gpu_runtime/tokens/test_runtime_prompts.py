"""Tokens of prompts that a trace gives in names alone."""

import numpy as np

from gpu_runtime.tokens.splitmix import counts, mix


def test_names_are_mixed_as_splitmix64_does():
    """Its first three numbers from seed 0 (Steele et al. 2014; Vigna's splitmix64.c)."""
    expected = np.array([0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F], dtype=np.uint64)
    assert (mix(counts(3)) == expected).all()
