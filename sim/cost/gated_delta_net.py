"""Gated DeltaNet: what its kernels take beside a layer's projections, per layer that keeps a state.

    decodes: launch + N bytes / H; bytes of a sequence's state and last inputs, read and written, and of its token
    prompts: launch + walked / W + n 4 (2 k + v) / H_conv, where walked = max(longest chunk + padding,
             (n + chunks padding) n_v / heads)

A kernel walks each chunk of a prompt head by head, W tokens a second, so many heads side by side; a chunk costs as many
tokens more as it takes to begin. N sequences decode, n are the tokens of prompts, n_v the value heads of one GPU.
A convolution over queries, keys and values runs before. `calib.gdn` fits it.

Mamba2's layers have a price by formula: a sequence that decodes reads and writes its state at the memory's rate, a
token of a prompt takes the FLOPs of its chunk (`scan_flops_per_token`) and the convolution's bytes. None was timed.
"""

from collections.abc import Iterable
from typing import NamedTuple

from sim.cost.profile import Profile
from sim.errors import UserError
from sim.specs.gated_delta_net import GatedDeltaNetSpec
from sim.specs.models import ModelSpec

HEAD_DIM = 128
"""Elements of the heads whose kernels were timed."""


class DeltaNetPrice(NamedTuple):
    """Per GPU of a group, of all layers that keep a state.

    Attributes:
        decode_launch_s, decode_s_per_sequence: of an iteration that decodes.
        prefill_launch_s, conv_s_per_token: of an iteration with chunks of prompts.
        walk_s_per_token: of one head.
        heads_share: value heads of a GPU to those that walk side by side.
        padding_tokens: what a chunk costs beside its tokens.
    """

    decode_launch_s: float
    decode_s_per_sequence: float
    prefill_launch_s: float
    conv_s_per_token: float
    walk_s_per_token: float
    heads_share: float
    padding_tokens: float

    @property
    def least_s_per_token(self) -> float:
        """Of a prompt's token, however many chunks there are and however they differ."""
        return self.conv_s_per_token + self.heads_share * self.walk_s_per_token

    def decode_s(self, num_decodes: int) -> float:
        """Kernels of `num_decodes` sequences that decode, s."""
        return self.decode_launch_s + num_decodes * self.decode_s_per_sequence if num_decodes else 0.0

    def prefill_s(self, chunks: Iterable[int]) -> float:
        """Kernels of chunks of prompts of so many tokens, s."""
        longest = tokens = count = 0
        for new in chunks:
            longest, tokens, count = max(longest, new), tokens + new, count + 1
        if not count:
            return 0.0
        together = (tokens + count * self.padding_tokens) * self.heads_share
        walked_s = max(longest + self.padding_tokens, together) * self.walk_s_per_token
        return self.prefill_launch_s + walked_s + tokens * self.conv_s_per_token


def delta_net_price(model: ModelSpec, profile: Profile, tp: int) -> DeltaNetPrice | None:
    """What the profile's constants make of a model's layers that keep a state; None where it has none.

    UserError where nothing like them was timed.
    """
    gdn, constants = model.gdn, profile.gdn
    if gdn is None:
        return None
    if gdn.scan_tokens:
        return _mamba2_price(model, gdn, profile, tp)
    if constants is None:
        raise UserError(
            f"profile {profile.name}: has no constants of Gated DeltaNet (gdn_decode_bytes_per_s ...), and "
            f"{gdn.num_layers} layers of {model.name} are that: take a GPU whose profile has them, as h200"
        )
    if (gdn.key_head_dim, gdn.value_head_dim) != (HEAD_DIM, HEAD_DIM):
        raise UserError(
            f"profile {profile.name}: kernels of Gated DeltaNet were timed with heads of {HEAD_DIM} elements, and "
            f"those of {model.name} have {gdn.key_head_dim} and {gdn.value_head_dim}: use another model"
        )
    layers, decode_rate = gdn.num_layers, constants["gdn_decode_bytes_per_s"]
    return DeltaNetPrice(
        layers * constants["gdn_decode_launch_s"],
        layers * gdn.decode_bytes(model.dtype_bytes, tp) / decode_rate,
        layers * constants["gdn_prefill_launch_s"],
        layers * gdn.conv_moved_bytes(model.dtype_bytes, tp) / constants["gdn_conv_bytes_per_s"],
        layers / constants["gdn_prefill_tokens_per_s"],
        gdn.num_value_heads / tp / constants["gdn_prefill_heads"],
        constants["gdn_prefill_padding_tokens"],
    )


def _mamba2_price(model: ModelSpec, gdn: GatedDeltaNetSpec, profile: Profile, tp: int) -> DeltaNetPrice:
    """Bytes at the memory's rate and FLOPs at the matrix units': no kernel of Mamba2 was timed."""
    bandwidth = profile.value("hbm_bytes_per_s")
    moved_s = gdn.conv_moved_bytes(model.dtype_bytes, tp) / bandwidth
    scanned_s = gdn.scan_flops_per_token(tp) / profile.value("flops_per_s")
    read_s = gdn.decode_bytes(model.dtype_bytes, tp) / bandwidth
    return DeltaNetPrice(0.0, gdn.num_layers * read_s, 0.0, gdn.num_layers * (moved_s + scanned_s), 0.0, 0.0, 0.0)
