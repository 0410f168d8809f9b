"""Kernels of Gated DeltaNet: samples of them, and the constants that explain these.

One sample is one layer's convolution and state update on one GPU, without the projections around them; a state has 32
bits, inputs 16. The terms are those of `sim.cost.gated_delta_net`:

    decodes: T = launch + N bytes / H
    prompts: T = launch + max(tokens + padding, N (tokens + padding) n_v / heads) / W + N tokens 4 (2 k + v) / H_conv

N sequences of as many tokens, n_v value heads; a head walks W tokens a second. Decodes were timed over and over on the
same states. Where all of them fit a GPU's L2 cache they come from there, which a model's other layers prevent: such
samples are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from calib.kernel_fit import KernelFit, KernelSample, KernelTerms, errors_of_fit, phases
from calib.robust import Array, Fit, Parameter, fit_relative
from sim.cost.gated_delta_net import HEAD_DIM
from sim.specs.gated_delta_net import GatedDeltaNetSpec
from sim.specs.hardware import HardwareSpec

DTYPE_BYTES, STATE_DTYPE_BYTES = 2.0, 4.0
LAUNCH_BOUND_BYTES, CACHE_BYTES = 1e6, 256e6
"""States of all sequences: below the first they take no time to speak of, beyond the second no L2 cache holds half of
them (the largest here has 126 MB)."""


class GdnSample(KernelSample, frozen=True, kw_only=True):
    """One operating point.

    Attributes:
        phase: `decode`, one token of each sequence, or `prefill`, prompts.
        num_key_heads, num_value_heads: of one GPU, of 128 elements each.
        batch: sequences.
        new_tokens: of each sequence.
        latency_s: mean seconds of one layer.
    """

    phase: Literal["decode", "prefill"]
    num_key_heads: int
    num_value_heads: int
    batch: int
    new_tokens: int
    latency_s: float
    what: ClassVar[str] = "Gated DeltaNet"
    checked: ClassVar[str] = "its sizes or latency_s"

    @property
    def is_possible(self) -> bool:
        has_sizes = min(self.num_key_heads, self.num_value_heads, self.batch, self.new_tokens) > 0
        return has_sizes and not (self.phase == "decode" and self.new_tokens > 1) and super().is_possible

    @property
    def layer(self) -> GatedDeltaNetSpec:
        """The layer that was timed."""
        return GatedDeltaNetSpec(
            num_layers=1, num_key_heads=self.num_key_heads, num_value_heads=self.num_value_heads,
            key_head_dim=HEAD_DIM, value_head_dim=HEAD_DIM, conv_kernel=4, state_dtype_bytes=STATE_DTYPE_BYTES,
        )  # fmt: skip

    @property
    def is_fitted(self) -> bool:
        """Whether its states come from memory, as a model's do, or take no time."""
        states = self.batch * self.layer.recurrent_bytes()
        return self.phase == "prefill" or not LAUNCH_BOUND_BYTES <= states <= CACHE_BYTES


@dataclass(frozen=True)
class GdnTerms(KernelTerms):
    """Per sample, arrays of shape (samples,).

    Attributes:
        is_decode: 1 or 0.
        decode_bytes: read and written by all sequences that decode.
        tokens, batch, heads: of a prompt, sequences, value heads.
        conv_bytes: read and written by the convolution over prompts.
    """

    is_decode: Array
    decode_bytes: Array
    tokens: Array
    batch: Array
    heads: Array
    conv_bytes: Array

    @classmethod
    def of(cls, samples: Sequence[GdnSample]) -> "GdnTerms":
        """The terms of samples."""
        rows = [
            (
                float(s.phase == "decode"),
                s.batch * s.layer.decode_bytes(DTYPE_BYTES),
                s.new_tokens,
                s.batch,
                s.num_value_heads,
                s.batch * s.new_tokens * s.layer.conv_moved_bytes(DTYPE_BYTES),
            )
            for s in samples
        ]
        return cls(*np.array(rows, dtype=np.float64).T)


def fit_gdn(samples: Sequence[GdnSample], hardware: HardwareSpec) -> KernelFit[GdnSample]:
    """A fit to the samples that `is_fitted`, with errors on numbers of value heads left out.

    Raises:
        UserError: samples of one number of heads, or of one phase.
    """
    chosen = [s for s in samples if s.is_fitted]
    heads = np.array([s.num_value_heads for s in chosen])
    parts = phases("gdn", GdnSample.what, [s.phase for s in chosen], heads)
    seconds, fit_to = np.array([s.latency_s for s in chosen]), partial(_fit, hardware=hardware)
    return KernelFit(chosen, *errors_of_fit(seconds, GdnTerms.of(chosen), heads, fit_to, predict_gdn_s), "heads", parts)


def _fit(terms: GdnTerms, seconds: Array, hardware: HardwareSpec) -> Fit:
    parameters = {
        "gdn_decode_bytes_per_s": Parameter(hardware.hbm_bytes_per_s / 2),
        "gdn_decode_launch_s": Parameter(5e-6, 0.0, log=False),
        "gdn_prefill_tokens_per_s": Parameter(2e7),
        "gdn_prefill_heads": Parameter(100.0),
        "gdn_prefill_padding_tokens": Parameter(100.0, 0.0, log=False),
        "gdn_conv_bytes_per_s": Parameter(hardware.hbm_bytes_per_s / 2),
        "gdn_prefill_launch_s": Parameter(1e-5, 0.0, log=False),
    }
    return fit_relative(lambda values: predict_gdn_s(values, terms), seconds, parameters)


def predict_gdn_s(constants: Mapping[str, float], terms: GdnTerms) -> Array:
    """Seconds of every sample, shape (samples,)."""
    decodes = constants["gdn_decode_launch_s"] + terms.decode_bytes / constants["gdn_decode_bytes_per_s"]
    padded = terms.tokens + constants["gdn_prefill_padding_tokens"]
    walked = np.maximum(padded, terms.batch * padded * terms.heads / constants["gdn_prefill_heads"])
    prompts = constants["gdn_prefill_launch_s"] + walked / constants["gdn_prefill_tokens_per_s"]
    prompts = prompts + terms.conv_bytes / constants["gdn_conv_bytes_per_s"]
    return np.where(terms.is_decode > 0, decodes, prompts)
