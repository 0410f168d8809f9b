"""`CostModel`: what an iteration and a copy take. The simulator's clock and every policy's predictions share it.

Three forms, chosen by the profile (per GPU of a tensor-parallel group of G):

- roofline: T = ridge(N c_lin / (G F), (W + N a) / (G H)) + attention over query-context pairs / (G F_attn)
  + KV bytes read by decodes / H + LM head for sampled tokens + all-reduce + per-layer and per-step overhead, where
  ridge(c, m) = (c^p + m^p)^(1/p) and a are the activations that the linear layers read and write for a token.
- paper: LayerKV Eq. 3 (prefill) and eLLM Eq. 3-4 (decode) as printed; wrong as predictions of time, kept to reproduce
  the papers' decisions.
- linear: given coefficients; copies cost seconds a block.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from math import ceil, inf, sqrt

from sim.cost.profile import FittedRange, Profile
from sim.engine.plan import Direction, IterationPlan
from sim.errors import UserError
from sim.specs.hardware import HardwareSpec
from sim.specs.models import ModelSpec

ACTIVATION_BYTES = 2
"""Bytes of an activation element (fp16/bf16)."""


class CostModel(ABC):
    """Seconds of iterations and copies. Deterministic, without state."""

    @abstractmethod
    def iteration_s(self, plan: IterationPlan) -> float:
        """Computation of one iteration, copies left out."""

    @abstractmethod
    def decode_run(self, num_decodes: int, context_tokens: int) -> tuple[float, float]:
        """First duration (s) and growth (s per iteration) of decode iterations of a batch that stays the same."""

    @abstractmethod
    def prefill_s(self, prompt_tokens: int, *, printed: bool = False) -> float:
        """LayerKV Eq. 3: predicted prefill of one prompt; `printed` leaves out the layer count as the paper does."""

    @abstractmethod
    def offload_s(self, num_tokens: int, layers: int, *, printed: bool = False) -> float:
        """LayerKV Eq. 4: predicted copy of `layers` layers of KV to the host; `printed`: all heads, one link."""

    @abstractmethod
    def copy_s(self, num_bytes: float, num_copies: int, direction: Direction) -> float:
        """Copy over PCIe of `num_bytes` per GPU in `num_copies` pieces, alone on the link."""

    @abstractmethod
    def swap_s(self, num_blocks: int) -> float:
        """vLLM 0.5.5's swap of whole blocks: one copy a layer, K and V apart, on the compute stream."""

    def all_reduce_s(self, num_tokens: int) -> float:
        """All-reduces of one iteration, part of `iteration_s`, s."""
        return 0.0

    beyond: dict[str, float]
    """What was priced beyond the range the constants were fitted on: quantity of `FittedRange`, most seen."""

    def __init__(self) -> None:
        self.beyond = {}

    all_reduce_on_pcie: bool = False
    """Whether all-reduces travel over the same lane as KV copies."""
    num_all_reduces: int = 0
    """All-reduces in one iteration."""
    copies_beside_compute: bool = True
    """Whether copies run while the device computes; else it makes them itself, one after the other."""


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
        kv_bytes: float = 0.0,
        copy_launch_s: float = 0.0,
    ) -> None:
        """`block_bytes` of a whole block and `kv_bytes` of one token in one layer, per GPU.

        `copy_launch_s` is the part of `swap_s_per_block` that does not depend on the block's bytes.
        """
        super().__init__()
        self.copy_launch_s = copy_launch_s
        self.copy_s_per_byte = max(0.0, swap_s_per_block - copy_launch_s) / block_bytes
        self.kv_bytes_per_token_layer = kv_bytes
        self.p0, self.p1, self.p2 = prefill
        self.d0, self.d1, self.d2 = decode
        self.swap_s_per_block = swap_s_per_block
        self.block_bytes = block_bytes

    def iteration_s(self, plan: IterationPlan) -> float:
        decode = self.d1 * plan.num_decodes + self.d2 * plan.decode_context_tokens
        if plan.chunks:
            return self.p0 + self.p1 * plan.prefill_tokens + self.p2 * plan.prefill_squares + decode
        return self.d0 + decode if plan.num_decodes else 0.0

    def decode_run(self, num_decodes: int, context_tokens: int) -> tuple[float, float]:
        return self.d0 + self.d1 * num_decodes + self.d2 * context_tokens, self.d2 * num_decodes

    def prefill_s(self, prompt_tokens: int, *, printed: bool = False) -> float:
        return self.p0 + self.p1 * prompt_tokens + (0.0 if printed else self.p2 * prompt_tokens * prompt_tokens)

    def offload_s(self, num_tokens: int, layers: int, *, printed: bool = False) -> float:
        return num_tokens * layers * self.kv_bytes_per_token_layer / self.block_bytes * self.swap_s_per_block

    def copy_s(self, num_bytes: float, num_copies: int, direction: Direction) -> float:
        # A layer of a block is one piece here: two of the copies that a plan counts, keys and values apart.
        return self.copy_launch_s * num_copies / 2 + num_bytes * self.copy_s_per_byte

    def swap_s(self, num_blocks: int) -> float:
        return num_blocks * self.swap_s_per_block


class RooflineCost(CostModel):
    """Form `roofline`: fitted constants on the model's own FLOPs and bytes."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, tp: int, block_bytes: float) -> None:
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
        self.activations_s_per_token = model.linear_activation_bytes_per_token(tp) / bandwidth
        self.attention_s_per_pair = model.attention_flops_per_token_pair / (tp * value("attention_flops_per_s"))
        self.kv_bytes_per_token_layer = model.kv_bytes_per_token_layer(tp)
        self.decode_s_per_context_token = self.kv_bytes_per_token_layer * model.num_layers / bandwidth
        self.head_s_per_sample = model.head_flops_per_token / (tp * flops)
        self.head_weights_s = model.head_weight_bytes / (tp * bandwidth)
        self.logits_s_per_sample = model.head_activation_bytes_per_token / (tp * bandwidth)
        self.overhead_s = value("step_overhead_s") + model.num_layers * value("layer_overhead_s")
        self._set_copies(model, hardware, profile, block_bytes)
        self._set_all_reduce(model, hardware, profile)
        # Eq. 3: alpha * s * (2P + 2 L h s) / FLOPS; the printed form lacks the L.
        scale = value("alpha") / (tp * hardware.fp16_flops_per_s)
        self.eq3_linear_s = scale * 2 * model.num_params
        self.eq3_square_s = scale * 2 * model.num_layers * model.hidden_size
        self.eq3_square_printed_s = scale * 2 * model.hidden_size

    def _set_range(self, seen: FittedRange) -> None:
        # Below the least seen, prompts cost what decodes of as many tokens do, and those begin at one.
        self.most_tokens = seen.tokens[1] if seen.tokens else inf
        self.most_batch = seen.batch[1] if seen.batch else inf
        self.most_context_tokens = seen.context_tokens[1] if seen.context_tokens else inf

    def _note_beyond(self, name: str, value: float) -> None:
        if value > self.beyond.get(name, 0.0):
            self.beyond[name] = value

    def _set_copies(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, block_bytes: float) -> None:
        value = profile.value
        self.links = -(-self.tp // hardware.gpus_per_pcie_link)
        # GPUs of the group that share a link share its bandwidth.
        share = self.tp / self.links
        self.d2h_s_per_byte = share / value("d2h_bytes_per_s")
        self.h2d_s_per_byte = share / value("h2d_bytes_per_s")
        self.copy_launch_s = value("copy_launch_s")
        self.block_bytes = block_bytes
        beta = value("beta")
        self.eq4_s_per_token_layer = beta * self.kv_bytes_per_token_layer * self.d2h_s_per_byte
        all_heads_bytes = 2 * model.num_heads * model.head_dim * model.kv_dtype_bytes
        self.eq4_printed_s_per_token_layer = beta * all_heads_bytes / value("d2h_bytes_per_s")

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
        return ridge(tokens * self.linear_s_per_token, memory, self.exponent)

    def head_s(self, num_sampled: int) -> float:
        """LM head for `num_sampled` tokens, s."""
        memory = self.head_weights_s + num_sampled * self.logits_s_per_sample
        return ridge(num_sampled * self.head_s_per_sample, memory, self.exponent)

    def iteration_s(self, plan: IterationPlan) -> float:
        if not plan.prefill_tokens:
            # A decode iteration that copies ride along with.
            return self.decode_run(plan.num_decodes, plan.decode_context_tokens)[0] if plan.num_decodes else 0.0
        tokens = plan.prefill_tokens + plan.num_decodes
        sampled = plan.num_sampled_prefills + plan.num_decodes
        seconds = (
            self.linear_s(tokens)
            + self.attention_s_per_pair * plan.prefill_pairs
            + self.decode_s_per_context_token * plan.decode_context_tokens
            + self.overhead_s
        )
        if sampled:
            seconds += self.head_s(sampled)
        if self.tp > 1:
            seconds += self.all_reduce_s_per_token * tokens + self.all_reduce_fixed_s
        if plan.prefill_tokens > self.most_tokens:
            self._note_beyond("tokens", plan.prefill_tokens)
        if plan.decode_context_tokens > self.most_context_tokens or plan.num_decodes > self.most_batch:
            self._note_decodes(plan.num_decodes, plan.decode_context_tokens)
        return seconds

    def _note_decodes(self, num_decodes: int, context_tokens: int) -> None:
        if num_decodes > self.most_batch:
            self._note_beyond("batch", num_decodes)
        if context_tokens > self.most_context_tokens:
            self._note_beyond("context_tokens", context_tokens)

    def decode_run(self, num_decodes: int, context_tokens: int) -> tuple[float, float]:
        # Batches are of few sizes and come again and again: what depends on the size alone is kept.
        batch_s = self._batch_s.get(num_decodes)
        if batch_s is None:
            batch_s = self.linear_s(num_decodes) + self.head_s(num_decodes) + self.overhead_s
            if self.tp > 1:
                batch_s += self.all_reduce_s_per_token * num_decodes + self.all_reduce_fixed_s
            self._batch_s[num_decodes] = batch_s
        first = batch_s + self.decode_s_per_context_token * context_tokens
        if context_tokens > self.most_context_tokens or num_decodes > self.most_batch:
            self._note_decodes(num_decodes, context_tokens)
        return first, self.decode_s_per_context_token * num_decodes

    def prefill_s(self, prompt_tokens: int, *, printed: bool = False) -> float:
        square = self.eq3_square_printed_s if printed else self.eq3_square_s
        return prompt_tokens * (self.eq3_linear_s + square * prompt_tokens)

    def offload_s(self, num_tokens: int, layers: int, *, printed: bool = False) -> float:
        if printed:
            return num_tokens * layers * self.eq4_printed_s_per_token_layer
        return num_tokens * layers * self.eq4_s_per_token_layer + 2 * layers * self.copy_launch_s

    def copy_s(self, num_bytes: float, num_copies: int, direction: Direction) -> float:
        per_byte = self.d2h_s_per_byte if direction is Direction.D2H else self.h2d_s_per_byte
        return self.copy_launch_s * num_copies + num_bytes * per_byte

    def swap_s(self, num_blocks: int) -> float:
        return self.copy_s(num_blocks * self.block_bytes, num_blocks * 2 * self.layers, Direction.D2H)

    def all_reduce_s(self, num_tokens: int) -> float:
        if self.tp == 1:
            return 0.0
        return self.all_reduce_s_per_token * num_tokens + self.all_reduce_fixed_s


class PaperCost(RooflineCost):
    """Form `paper`: iterations by the printed equations (LayerKV Eq. 3; eLLM Eq. 3-4), copies as in the roofline.

    Decode per sequence: 24 h^2 L + 4 h L (s+1) + 2 h V s FLOPs over peak FLOPS. The last term charges the LM head for
    the whole context and nothing is charged for memory bandwidth: use it to reproduce decisions, not times.
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, tp: int, block_bytes: float) -> None:
        super().__init__(model, hardware, profile, tp, block_bytes)
        h, layers = model.hidden_size, model.num_layers
        peak = tp * hardware.fp16_flops_per_s
        self.eq3_decode_s = 24 * h * h * layers / peak
        # Context here counts the token being fed: s + 1.
        self.eq3_decode_s_per_context_token = (4 * h * layers + 2 * h * model.vocab_size) / peak

    def iteration_s(self, plan: IterationPlan) -> float:
        prefill = self.eq3_linear_s * plan.prefill_tokens + self.eq3_square_printed_s * plan.prefill_squares
        return prefill + self.decode_run(plan.num_decodes, plan.decode_context_tokens)[0]

    def decode_run(self, num_decodes: int, context_tokens: int) -> tuple[float, float]:
        slope = self.eq3_decode_s_per_context_token
        return self.eq3_decode_s * num_decodes + slope * context_tokens, slope * num_decodes


def build_cost(
    model: ModelSpec, hardware: HardwareSpec, profile: Profile, tp: int, block_bytes: float, form: str | None = None
) -> CostModel:
    """The cost model of a profile, in the profile's own form or, for roofline profiles, in `paper` form."""
    form = form or profile.form
    if profile.form == "linear" or form == "linear":
        if profile.form != form or profile.linear is None:
            raise UserError(f"cost form {form!r} cannot come from profile {profile.name!r} of form {profile.form!r}")
        linear = profile.linear
        kv_bytes, swap_s, launch_s = model.kv_bytes_per_token_layer(tp), linear.swap_s_per_block, linear.copy_launch_s
        cost: CostModel = LinearCost(linear.prefill, linear.decode, swap_s, block_bytes, kv_bytes, launch_s)
    elif form == "roofline":
        cost = RooflineCost(model, hardware, profile, tp, block_bytes)
    elif form == "paper":
        cost = PaperCost(model, hardware, profile, tp, block_bytes)
    else:
        raise UserError(f"cost form: {form!r} is not one of roofline, paper, linear")
    cost.copies_beside_compute = hardware.copies_beside_compute
    return cost


def ridge(compute_s: float, memory_s: float, exponent: float) -> float:
    """Time of work that computes for `compute_s` and moves memory for `memory_s`, s.

    (c^p + m^p)^(1/p): p = 1 one after the other, p towards infinity perfect overlap, max(c, m). Kernels lie between:
    waves of tiles that leave multiprocessors idle, and prologues that wait for memory, round off the roofline's ridge.
    """
    if compute_s < memory_s:
        compute_s, memory_s = memory_s, compute_s
    return compute_s * (1.0 + (memory_s / compute_s) ** exponent) ** (1.0 / exponent)


def run_s(first_s: float, slope_s: float, steps: int) -> float:
    """Duration of `steps` iterations, the first `first_s` long and each further one longer by `slope_s`."""
    return first_s * steps + slope_s * (steps * (steps - 1) / 2)


def steps_until(target_s: float, first_s: float, slope_s: float, max_steps: int) -> int:
    """Fewest iterations (at least 1, at most `max_steps`) that together last `target_s` or longer."""
    if target_s <= first_s:
        return 1
    if first_s <= 0.0 and slope_s <= 0.0:
        # Iterations that take no time never get there.
        return max_steps
    if slope_s * max_steps <= 1e-9 * first_s:
        steps = ceil(target_s / first_s)
    else:
        half = first_s - slope_s / 2
        steps = ceil((sqrt(half * half + 2 * slope_s * target_s) - half) / slope_s)
    steps = max(1, min(steps, max_steps))
    # Rounding may be off by one either way.
    while steps > 1 and run_s(first_s, slope_s, steps - 1) >= target_s:
        steps -= 1
    while steps < max_steps and run_s(first_s, slope_s, steps) < target_s:
        steps += 1
    return steps
