"""What a decode step of eLLM takes and keeps, as functions of the batch size b and the uncached ratio r.

Chen et al., "High Throughput and Low Latency LLM Serving via Adaptive KV Caching", EuroSys '26, Eq. 2-9. The first r of
every sequence's tokens have no KV on the GPU: of l1 + l2 layers that follow one another, l1 have theirs copied in from
the host and l2 compute it again, in every step.

`paper_times` has Eq. 2-4 and 6-9 as printed, `corrected_times` what they should say:

- Logits are computed for one token a sequence, 2hV; printed for all of them, and for those computed again.
- 24 h^2 L and 4 L h assume multi-head attention and an ungated MLP: the model's own FLOPs and bytes take their place.
- Causal attention computes half of the printed 4 h s^2 r^2.
- Decodes read weights and KV: T is the longer of computing and reading, and nothing printed reads.
- Of the l1 + l2 layers l2 compute and l1 are copied; Eq. 7 divides what is one layer's cost by L.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.specs.models import ModelSpec

Floats = NDArray[np.float64]


class Configuration(NamedTuple):
    """Of `swapped + recomputed` layers that follow one another, how each comes by the KV of uncached tokens."""

    swapped: int
    """l1"""
    recomputed: int
    """l2"""

    @property
    def window(self) -> int:
        """Layers after which the pattern repeats."""
        return self.swapped + self.recomputed

    @property
    def recomputed_share(self) -> float:
        """Of all layers."""
        return self.recomputed / self.window

    @property
    def scratch_layers(self) -> int:
        """Layers of uncached KV on the GPU at a time, M_o = 8hbsr (l1 + l2): swap buffer, K1's and K2's."""
        return 2 * self.window

    def is_recomputed(self, layer: int) -> bool:
        """Whether a layer computes the KV of uncached tokens again; each window begins with those that do."""
        return layer % self.window < self.recomputed

    def recomputed_layers(self, num_layers: int) -> int:
        """Of a model of so many, those that compute again."""
        whole, rest = divmod(num_layers, self.window)
        return whole * self.recomputed + min(rest, self.recomputed)


CONFIGURATIONS = tuple(Configuration(swapped, recomputed) for recomputed in (1, 2) for swapped in (1, 2, 3))
"""Recomputation of at most two layers and swapping of at most three at a time (section 4.3.1)."""


class StepCosts(NamedTuple):
    """Seconds of a step over b sequences of S tokens in all and Q = sum of squared lengths, r of them uncached.

    decode computes `decode_s` b + `context_s` S, reads `weights_s` + `read_s` S;
    recomputation of all layers: `recompute_s` r S + `square_s` r^2 Q; a swap of all layers (Eq. 6): `swap_s` r S +
    `swap_launch_s`. `fixed_s` is everything that does not depend on b, r and S.
    """

    decode_s: float
    context_s: float
    recompute_s: float
    square_s: float
    weights_s: float = 0.0
    read_s: float = 0.0
    swap_s: float = 0.0
    swap_launch_s: float = 0.0
    fixed_s: float = 0.0
    logits_s: float = 0.0
    """Of `context_s` and `recompute_s`: logits of all tokens, which Eq. 7-9 as printed charge whole to each window."""
    printed_layers: int = 1
    """L where Eq. 7-9 are as printed: Eq. 7 divides by it what is one layer's already. Else 1."""

    def recomputing_s(self, tokens: Floats, squares: Floats, ratio: Floats, share: Floats | float) -> Floats:
        """Eq. 7, corrected: `share` of the layers computed again for `ratio` of the tokens."""
        return share * ratio * (self.recompute_s * tokens + self.square_s * squares * ratio)

    def swapping_s(self, tokens: Floats, ratio: Floats, share: Floats | float) -> Floats:
        """Eq. 6: `share` of the layers copied in for `ratio` of the tokens."""
        return share * (self.swap_s * tokens * ratio + self.swap_launch_s * (ratio > 0.0))

    def cached_s(self, seqs: Floats, tokens: Floats) -> Floats:
        """T(b, 0): nothing is uncached."""
        return self.fixed_s + np.maximum(*self._decoding_s(seqs, tokens))

    def _decoding_s(self, seqs: Floats, tokens: Floats) -> tuple[Floats, Floats]:
        """Computing and reading."""
        return self.decode_s * seqs + self.context_s * tokens, self.weights_s + self.read_s * tokens

    def step_s(
        self,
        seqs: Floats,
        tokens: Floats,
        squares: Floats,
        ratio: Floats,
        shares: tuple[Floats | float, Floats | float] = (0.0, 1.0),
        *,
        fused: bool = True,
        overlapped: bool = True,
    ) -> Floats:
        """T(b, r), Eq. 4; `shares` of the layers that are swapped and computed again. It rises with `ratio`.

        Fused kernels recompute while decodes read; separate ones do so in turn. Copies are `overlapped` with both.
        """
        again = self.recomputing_s(tokens, squares, ratio, shares[1])
        compute, read = self._decoding_s(seqs, tokens)
        kernels = np.maximum(compute + again, read) if fused else np.maximum(compute, read) + again
        copies = self.swapping_s(tokens, ratio, shares[0])
        return self.fixed_s + (np.maximum(kernels, copies) if overlapped else kernels + copies)

    def bubble(self, tokens: float, squares: float, ratio: float, configuration: Configuration) -> float:
        """L |Eq. 6 - Eq. 7|, s: what one window's swap and its recomputation differ by."""
        swap_s = self.swap_s * ratio * tokens + self.swap_launch_s
        again_s = ratio * ((self.recompute_s - self.logits_s) * tokens + self.square_s * squares * ratio)
        again_s *= configuration.recomputed / self.printed_layers
        return abs(swap_s * configuration.swapped - again_s - self.printed_layers * self.logits_s * ratio * tokens)

    def volumes(
        self, seqs: int, tokens: int, uncached: int, squares: int, configuration: Configuration
    ) -> tuple[float, float]:
        """L V_K1 and L V_K2 (Eq. 8-9) over FLOP/s, of a window.

        `uncached` tokens, their squares by sequence `squares` in all, of contexts of `tokens`.
        """
        logits_s = self.logits_s
        again_s = (self.recompute_s - logits_s) * uncached + self.square_s * squares
        decode_s = self.decode_s * seqs + (self.context_s - logits_s) * tokens
        of_all = self.printed_layers * logits_s
        return (
            configuration.recomputed * again_s + of_all * uncached,
            configuration.window * decode_s + of_all * tokens,
        )


def paper_times(model: ModelSpec, flops_per_s: float) -> StepCosts:
    """Eq. 2-4 and 7-9 as printed, at the GPUs' peak."""
    h, layers, vocab = model.hidden_size, model.num_layers, model.vocab_size
    linear, pair, head = 24 * h * h * layers, 4 * h * layers, 2 * h * vocab
    return StepCosts(
        (linear + pair) / flops_per_s, (pair + head) / flops_per_s, (linear + head) / flops_per_s, pair / flops_per_s,
        logits_s=head / flops_per_s, printed_layers=layers,
    )  # fmt: skip


def corrected_times(
    model: ModelSpec,
    *,
    flops_per_s: float,
    bytes_per_s: float,
    h2d_bytes_per_s: float,
    fixed_s: float,
) -> StepCosts:
    """The corrected forms on rates that all GPUs of a group reach together: FLOP/s, HBM and PCIe bytes/s."""
    linear, pair = model.linear_flops_per_token, model.attention_flops_per_token_pair
    return StepCosts(
        decode_s=(linear + model.head_flops_per_token) / flops_per_s,
        context_s=pair / flops_per_s,
        recompute_s=linear / flops_per_s,
        square_s=pair / 2 / flops_per_s,
        weights_s=(model.linear_weight_bytes + model.head_weight_bytes) / bytes_per_s,
        read_s=model.kv_bytes_per_token() / bytes_per_s,
        swap_s=model.kv_bytes_per_token() / h2d_bytes_per_s,
        fixed_s=fixed_s,
    )


def threads_for_recomputation(recompute: float, decode: float, threads: int = 1024) -> int:
    """Of a fused kernel's `threads` a block, those that recompute, by the volumes of both (Eq. 8-9), in whole warps.

    Either keeps a warp: 31 values from 32 to 992.
    """
    share = recompute / (recompute + decode) if recompute + decode > 0.0 else 0.5
    return min(max(32 * round(threads / 32 * share), 32), threads - 32)


def thread_loss(recompute: float, decode: float, share: float) -> float:
    """How much longer a fused kernel of these volumes lasts with `share` of its threads recomputing; 1: no longer."""
    return max(recompute / share, decode / (1.0 - share)) / (recompute + decode)
