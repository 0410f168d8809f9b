"""The forms of the cost model, chosen by the profile (per GPU of a tensor-parallel group of G).

- roofline: T = ridge(N c_lin / (G F), (W + N a) / (G H)) + attention over query-context pairs / (G F_attn)
  + KV bytes read by decodes / H + LM head for sampled tokens + all-reduce + overhead of each layer, where
  ridge(c, m) = (c^p + m^p)^(1/p) and a are the activations that the linear layers read and write for a token. Of a
  mixture of experts, W holds those that N tokens meet. A decode's KV that needs computing as well, because it is
  quantised or latent, costs ridge(FLOPs / (G F_attn) + vector operations / (F / 16), bytes / H) for each token read.
  What the engine's host takes is beside it (`CostModel.host`); its CUDA graphs pad the tokens of a decode batch.
- paper: LayerKV Eq. 3 (prefill) and eLLM Eq. 3-4 (decode) as printed; wrong as predictions of time, kept to reproduce
  the papers' decisions.
- linear: given coefficients; copies cost seconds a block.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import ceil, inf
from typing import TYPE_CHECKING

from sim.cost.model import ACTIVATION_BYTES, CostModel, ridge
from sim.cost.profile import FittedRange, Profile
from sim.engine.plan import Direction, IterationPlan, WindowTokens
from sim.errors import InvariantError, UserError
from sim.specs.hardware import HardwareSpec
from sim.specs.kv_format import KVFormat, window_pairs
from sim.specs.models import ModelSpec

if TYPE_CHECKING:
    from sim.cost.engine_profile import EngineProfile

VECTOR_SHARE = 1 / 16
"""Vector operations a second, of the tensor cores' FLOP/s (an assumption: A100 19.5 of 312 TFLOPS, H100 67 of 989).
They dequantise KV; the fits know of no quantised KV."""


class LinearCost(CostModel):
    """Form `linear`: prefill p0 + p1*tokens + p2*sum(len^2), decode d0 + d1*batch + d2*context tokens (s).

    An iteration with both costs the prefill plus d1*batch + d2*context.
    """

    def __init__(
        self,
        prefill: Seq[float],
        decode: Seq[float],
        swap_s_per_block: float,
        block_bytes: float,
        copy_launch_s: float = 0.0,
        model: ModelSpec | None = None,
    ) -> None:
        """`block_bytes` of a whole block, per GPU.

        `copy_launch_s` is the part of `swap_s_per_block` that does not depend on the block's bytes. `model` is needed
        to price single layers.
        """
        super().__init__()
        self.copy_launch_s = copy_launch_s
        self.copy_s_per_byte = max(0.0, swap_s_per_block - copy_launch_s) / block_bytes
        self.num_layers = model.num_layers if model else 0
        # Of a prompt token's linear work in all layers, the keys and values of one.
        self.projection = projection_flops(model) / model.linear_flops_per_token if model else None
        self.p0, self.p1, self.p2 = prefill
        self.d0, self.d1, self.d2 = decode
        self.host_base_s = self.host_s_per_token = 0.0
        """What of these the host takes: for an iteration, and for each token of its prompts and contexts."""
        # Of a context token's seconds, the share of the layers that read a window only.
        self.window_share = model.kv_format().num_window_readers / model.num_layers if model else 0.0

    def iteration_s(self, plan: IterationPlan) -> float:
        context_tokens: float = plan.decode_context_tokens
        if plan.decode_window is not None:
            context_tokens += self.window_share * (plan.decode_window.tokens - context_tokens)
        num_decodes = plan.num_decodes + plan.num_single_chunks
        decode = self.d1 * num_decodes + self.d2 * context_tokens
        if plan.prefill_tokens:
            return self.p0 + self.p1 * plan.prefill_tokens + self.p2 * plan.prefill_squares + decode
        return self.d0 + decode if num_decodes else 0.0

    def host_s(self, plan: IterationPlan) -> float:
        return self.host_base_s + self.host_s_per_token * (plan.prefill_tokens + plan.decode_context_tokens)

    def decode_run(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None
    ) -> tuple[float, float]:
        read: float = context_tokens
        growing: float = num_decodes
        if window is not None:
            read += self.window_share * (window.tokens - context_tokens)
            growing += self.window_share * (window.num_growing - num_decodes)
        return self.d0 + self.d1 * num_decodes + self.d2 * read, self.d2 * growing

    def unread_s(self, num_tokens: int) -> float:
        return self.d2 * (1.0 - self.window_share) * num_tokens

    def prefill_s(self, prompt_tokens: int) -> float:
        return self.p0 + self.p1 * prompt_tokens + self.p2 * prompt_tokens * prompt_tokens

    def num_copies(self, num_blocks: int, layers: int) -> int:
        # The seconds of a swapped block are those of one piece, whatever it holds of the layers.
        return num_blocks

    def copy_s(self, num_bytes: float, num_copies: int, direction: Direction) -> float:
        return self.copy_launch_s * num_copies + num_bytes * self.copy_s_per_byte

    def project_s(self, num_tokens: int) -> float:
        if self.projection is None:
            raise InvariantError("a linear cost without the model's shapes cannot price projections")
        return self.p1 * self.projection * num_tokens

    def recompute_s(self, num_tokens: int) -> float:
        if self.projection is None:
            raise InvariantError("a linear cost without the model's shapes cannot price single layers")
        return (self.p1 * num_tokens + self.p2 * num_tokens * num_tokens) / self.num_layers


class RooflineCost(CostModel):
    """Form `roofline`: fitted constants on the model's own FLOPs and bytes."""

    padded: Callable[[int], int] | None = None
    """Tokens that the linear layers compute for a decode batch of so many, where the engine's CUDA graphs pad it."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, tp: int) -> None:
        super().__init__()
        value = profile.value
        flops, bandwidth = value("flops_per_s"), value("hbm_bytes_per_s")
        self._set_range(profile.range or FittedRange())
        self._batch_s: dict[int, float] = {}
        self.exponent = value("roofline_exponent")
        self.tp = tp
        self.layers = model.num_layers
        self.linear_s_per_token = model.linear_flops_per_token / (tp * flops)
        self.linear_weights_s = model.linear_weight_bytes / (tp * bandwidth)
        self._set_experts(model, tp * bandwidth)
        self.activations_s_per_token = model.linear_activation_bytes_per_token(tp) / bandwidth
        self.attention_s_per_pair = model.attention_flops_per_token_pair / (tp * value("attention_flops_per_s"))
        self._set_kv(model, model.kv_format(tp), bandwidth, flops, value("attention_flops_per_s"))
        self.head_s_per_sample = model.head_flops_per_token / (tp * flops)
        self.head_weights_s = model.head_weight_bytes / (tp * bandwidth)
        self.logits_s_per_sample = model.head_activation_bytes_per_token / (tp * bandwidth)
        self.overhead_s = model.num_layers * value("layer_overhead_s")
        self._set_copies(hardware, profile)
        self.pieces_per_layer = (1 if model.mla else 2) * model.num_stored_layers / model.num_layers
        self._set_all_reduce(model, hardware, profile)
        self.projection_s_per_token = projection_flops(model) / (tp * flops)

    def _set_range(self, seen: FittedRange) -> None:
        # Below the least seen, prompts cost what decodes of as many tokens do, and those begin at one.
        self.most_tokens = seen.tokens[1] if seen.tokens else inf
        self.most_batch = seen.batch[1] if seen.batch else inf
        self.most_context_tokens = seen.context_tokens[1] if seen.context_tokens else inf

    def _set_experts(self, model: ModelSpec, bandwidth: float) -> None:
        """Seconds that reading all routed experts takes, and the share of them that one token leaves alone."""
        moe = model.moe
        self.routed_weights_s = self.idle_share = 0.0
        if moe:
            self.routed_weights_s = (model.linear_weight_bytes - model.linear_weight_bytes_read(0)) / bandwidth
            self.idle_share = 1 - moe.experts_per_token / moe.num_experts

    def _set_kv(self, model: ModelSpec, kv: KVFormat, bandwidth: float, flops: float, attention_flops: float) -> None:
        """Seconds of a decode per token that the layers with and without a window read."""
        self.kv = kv
        self.last_token_share = model.last_token_share
        compute_s = kv.flops_per_token_read / attention_flops
        compute_s += kv.dequantize_ops_per_token_read / (VECTOR_SHARE * flops)

        def read_s(layers: int) -> float:
            seconds = kv.token_layer_bytes * layers / bandwidth
            return ridge(compute_s * layers, seconds, self.exponent) if compute_s and layers else seconds

        self.full_s_per_token, self.window_s_per_token = read_s(kv.num_full_readers), read_s(kv.num_window_readers)
        # What several decodes read together is read once and computed for each. Windows are not shared.
        full_share = kv.num_full_readers / self.layers
        computed_s = max(self.attention_s_per_pair * full_share, compute_s * kv.num_full_readers)
        self.unread_s_per_token = max(0.0, self.full_s_per_token - computed_s)
        # Where nobody says what is in the windows, as if they held everything.
        self.decode_s_per_context_token = self.full_s_per_token + self.window_s_per_token
        self.is_uniform = kv.window is None and not self.last_token_share

    def _note_beyond(self, name: str, value: float) -> None:
        if value > self.beyond.get(name, 0.0):
            self.beyond[name] = value

    def _set_copies(self, hardware: HardwareSpec, profile: Profile) -> None:
        value = profile.value
        self.links = -(-self.tp // hardware.gpus_per_pcie_link)
        # GPUs of the group that share a link share its bandwidth.
        share = self.tp / self.links
        self.d2h_s_per_byte = share / value("d2h_bytes_per_s")
        self.h2d_s_per_byte = share / value("h2d_bytes_per_s")
        self.copy_launch_s = value("copy_launch_s")

    def _set_all_reduce(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile) -> None:
        tp, value = self.tp, profile.value
        self.all_reduce_on_pcie = tp > 1 and hardware.nvlink_bytes_per_s is None
        self.num_all_reduces = 2 * model.num_layers if tp > 1 else 0
        self.all_reduce_s_per_token = 0.0
        self.all_reduce_fixed_s = 0.0
        if tp > 1:
            ring = 2 * (tp - 1) / tp * model.hidden_size * ACTIVATION_BYTES
            self.all_reduce_s_per_token = self.num_all_reduces * ring / value("allreduce_bytes_per_s")
            self.all_reduce_fixed_s = self.num_all_reduces * 2 * (tp - 1) * value("allreduce_latency_s")

    def linear_s(self, tokens: int) -> float:
        """Linear layers of all layers over `tokens` tokens, s."""
        memory = self.linear_weights_s + tokens * self.activations_s_per_token
        if self.routed_weights_s:
            memory -= self.routed_weights_s * self.idle_share**tokens
        return ridge(tokens * self.linear_s_per_token, memory, self.exponent)

    def _linear_parts_s(self, tokens: int, last_tokens: int) -> float:
        """The same where some of the layers see a prompt's last token only."""
        share = self.last_token_share
        seconds = (1 - share) * self.linear_s(tokens)
        return seconds + share * self.linear_s(last_tokens) if last_tokens else seconds

    def _attention_s(self, cached: int, num_new: int, is_sampled: bool) -> float:
        """Attention of all layers over `num_new` prompt tokens after `cached` ones, s."""
        pairs = 0
        for layers in self.kv.layers:
            if layers.last_token_only:
                pairs += layers.num_layers * (cached + num_new) * is_sampled
            elif layers.window is not None:
                pairs += layers.num_layers * window_pairs(cached, num_new, layers.window)
            else:
                pairs += layers.num_layers * (num_new * cached + num_new * (num_new + 1) // 2)
        return self.attention_s_per_pair / self.layers * pairs

    def _uneven_s(self, plan: IterationPlan) -> float:
        """Linear layers and prompts' attention of an iteration where layers differ."""
        sampled = plan.num_sampled_prefills + plan.num_decodes
        seconds = self._linear_parts_s(plan.prefill_tokens + plan.num_decodes, sampled)
        for seq, num_new, cached, _ in plan.chunks:
            seconds += self._attention_s(cached, num_new, cached + num_new == seq.num_tokens)
        return seconds

    def head_s(self, num_sampled: int) -> float:
        """LM head for `num_sampled` tokens, s."""
        memory = self.head_weights_s + num_sampled * self.logits_s_per_sample
        return ridge(num_sampled * self.head_s_per_sample, memory, self.exponent)

    def iteration_s(self, plan: IterationPlan) -> float:
        num_decodes = plan.num_decodes + plan.num_single_chunks
        if not plan.prefill_tokens:
            # A decode iteration that copies ride along with.
            decodes = num_decodes, plan.decode_context_tokens, plan.decode_window
            return self.decode_run(*decodes)[0] if num_decodes else 0.0
        tokens = plan.prefill_tokens + num_decodes
        sampled = plan.num_sampled_prefills + plan.num_decodes
        if self.is_uniform:
            work_s = self.linear_s(tokens) + self.attention_s_per_pair * plan.prefill_pairs
        else:
            work_s = self._uneven_s(plan)
        if plan.decode_window is None:
            read_s = self.decode_s_per_context_token * plan.decode_context_tokens
        else:
            read_s = self.full_s_per_token * plan.decode_context_tokens
            read_s += self.window_s_per_token * plan.decode_window.tokens
        seconds = work_s + read_s + self.overhead_s
        if sampled:
            seconds += self.head_s(sampled)
        if self.tp > 1:
            seconds += self.all_reduce_s_per_token * tokens + self.all_reduce_fixed_s
        if plan.prefill_tokens > self.most_tokens:
            self._note_beyond("tokens", plan.prefill_tokens)
        if plan.decode_context_tokens > self.most_context_tokens or num_decodes > self.most_batch:
            self._note_decodes(num_decodes, plan.decode_context_tokens)
        return seconds

    def _note_decodes(self, num_decodes: int, context_tokens: int) -> None:
        if num_decodes > self.most_batch:
            self._note_beyond("batch", num_decodes)
        if context_tokens > self.most_context_tokens:
            self._note_beyond("context_tokens", context_tokens)

    def decode_run(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None
    ) -> tuple[float, float]:
        # Batches are of few sizes and come again and again: what depends on the size alone is kept.
        batch_s = self._batch_s.get(num_decodes)
        if batch_s is None:
            tokens = num_decodes if self.padded is None else self.padded(num_decodes)
            batch_s = self.linear_s(tokens) + self.head_s(num_decodes) + self.overhead_s
            if self.tp > 1:
                batch_s += self.all_reduce_s_per_token * tokens + self.all_reduce_fixed_s
            self._batch_s[num_decodes] = batch_s
        if window is None:
            slope = self.decode_s_per_context_token * num_decodes
            first = batch_s + self.decode_s_per_context_token * context_tokens
        else:
            slope = self.full_s_per_token * num_decodes + self.window_s_per_token * window.num_growing
            first = batch_s + self.full_s_per_token * context_tokens + self.window_s_per_token * window.tokens
        if context_tokens > self.most_context_tokens or num_decodes > self.most_batch:
            self._note_decodes(num_decodes, context_tokens)
        return first, slope

    def unread_s(self, num_tokens: int) -> float:
        return self.unread_s_per_token * num_tokens

    def prefill_s(self, prompt_tokens: int) -> float:
        seconds = self._prompt_s(prompt_tokens) + self.overhead_s + self.head_s(1)
        seconds += 0.0 if self.host is None else self.host.added_s(1)
        return seconds + self.all_reduce_s(prompt_tokens)

    def _prompt_s(self, num_tokens: int) -> float:
        """Linear layers and attention of a prompt alone."""
        if self.is_uniform:
            pairs = num_tokens * (num_tokens + 1) // 2
            return self.linear_s(num_tokens) + self.attention_s_per_pair * pairs
        return self._linear_parts_s(num_tokens, 1) + self._attention_s(0, num_tokens, is_sampled=True)

    def project_s(self, num_tokens: int) -> float:
        return self.projection_s_per_token * num_tokens

    def recompute_s(self, num_tokens: int) -> float:
        return self._prompt_s(num_tokens) / self.layers

    def num_copies(self, num_blocks: int, layers: int) -> int:
        # vLLM 0.5.5 copies each layer's keys and values apart; a latent is one piece.
        return ceil(self.pieces_per_layer * num_blocks * layers)

    def copy_s(self, num_bytes: float, num_copies: int, direction: Direction) -> float:
        per_byte = self.d2h_s_per_byte if direction is Direction.D2H else self.h2d_s_per_byte
        return self.copy_launch_s * num_copies + num_bytes * per_byte

    def all_reduce_s(self, num_tokens: int) -> float:
        if self.tp == 1:
            return 0.0
        return self.all_reduce_s_per_token * num_tokens + self.all_reduce_fixed_s


class PaperCost(RooflineCost):
    """Form `paper`: iterations by the printed equations (LayerKV Eq. 3; eLLM Eq. 3-4), copies as in the roofline.

    Decode per sequence: 24 h^2 L + 4 h L (s+1) + 2 h V s FLOPs over peak FLOPS. The last term charges the LM head for
    the whole context and nothing is charged for memory bandwidth: use it to reproduce decisions, not times.
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, tp: int) -> None:
        super().__init__(model, hardware, profile, tp)
        h, layers = model.hidden_size, model.num_layers
        peak = tp * hardware.fp16_flops_per_s
        scale = profile.value("alpha") / peak
        self.eq3_linear_s = scale * 2 * model.num_params
        # The printed attention term lacks the layer count.
        self.eq3_square_printed_s = scale * 2 * h
        self.eq3_decode_s = 24 * h * h * layers / peak
        # Context here counts the token being fed: s + 1.
        self.eq3_decode_s_per_context_token = (4 * h * layers + 2 * h * model.vocab_size) / peak

    def iteration_s(self, plan: IterationPlan) -> float:
        prefill = self.eq3_linear_s * plan.prefill_tokens + self.eq3_square_printed_s * plan.prefill_squares
        num_decodes = plan.num_decodes + plan.num_single_chunks
        return prefill + self.decode_run(num_decodes, plan.decode_context_tokens)[0]

    def decode_run(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None
    ) -> tuple[float, float]:
        slope = self.eq3_decode_s_per_context_token
        return self.eq3_decode_s * num_decodes + slope * context_tokens, slope * num_decodes

    def unread_s(self, num_tokens: int) -> float:
        # The equations know of no memory.
        return 0.0

    def prefill_s(self, prompt_tokens: int) -> float:
        return prompt_tokens * (self.eq3_linear_s + self.eq3_square_printed_s * prompt_tokens)


def build_cost(
    model: ModelSpec,
    hardware: HardwareSpec,
    profile: Profile,
    tp: int,
    block_bytes: float,
    form: str | None = None,
    engine: "EngineProfile | None" = None,
) -> CostModel:
    """The cost model of a profile, in the profile's own form or, for roofline profiles, in `paper` form.

    `engine` adds host time and padded batches to the form `roofline`; prices of the others are all there is.
    """
    form = form or profile.form
    if profile.form == "linear" or form == "linear":
        if profile.form != form or profile.linear is None:
            raise UserError(f"cost form {form!r} cannot come from profile {profile.name!r} of form {profile.form!r}")
        linear = profile.linear
        swap_s, launch_s = linear.swap_s_per_block, linear.copy_launch_s
        cost: CostModel = LinearCost(linear.prefill, linear.decode, swap_s, block_bytes, launch_s, model)
    elif form == "roofline":
        cost = RooflineCost(model, hardware, profile, tp)
        if engine is not None:
            cost.host = engine.host_time()
            # A CPU, which makes its copies itself, launches no graphs.
            cost.padded = engine.padding() if hardware.copies_beside_compute else None
    elif form == "paper":
        cost = PaperCost(model, hardware, profile, tp)
    else:
        raise UserError(f"cost form: {form!r} is not one of roofline, paper, linear")
    cost.copies_beside_compute = hardware.copies_beside_compute
    return cost


def projection_flops(model: ModelSpec) -> float:
    """Multiplications and additions that make one token's keys and values of one layer from its input."""
    return model.kv_projection_flops_per_token_layer
