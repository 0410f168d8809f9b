"""Form `roofline` where routed experts lie on all GPUs of an engine: of every data-parallel rank, whole or in shares.

The ranks compute attention, shared experts and all else each for its own sequences. At every layer with routed experts
the tokens of all meet: by default an all-gather brings them to every GPU (`dispatch`), each computes what it has of the
experts, and a reduce-scatter brings the sums back (`combine`). That is vLLM's `--all2all-backend
allgather_reducescatter`, and what SGLang's attention in data parallelism does. DeepEP sends tokens where their experts
are (`sim.cost.all2all`). So an iteration lasts

    max over ranks (all but the routed experts) + layers x (dispatch + experts of the slowest GPU + combine)

- **Shares of every expert** (no expert parallelism): as in a tensor-parallel group of all GPUs.
- **Whole experts**: E/G on each of G GPUs. What the slowest takes is a mean over draws (`sim.specs.expert_loads`). Rows
  of other GPUs' experts are passed over, but the weighted sum reads a result for each.
- **Where no such kernel was timed**, experts are products like others, at their rates.
- An all-gather of B bytes is (G-1) steps of the ring, half of what an all-reduce of B has, and a reduce-scatter the
  other half; as measured where the profile has points of G GPUs. Between nodes it takes as long as links need at least.

By itself the model prices an iteration as if all ranks had the same; `set_together` says what they have.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, sqrt

from sim.cost.all2all import DeepEP
from sim.cost.kernels import Grid, grid_of, value_at
from sim.cost.model import ACTIVATION_BYTES, ridge
from sim.cost.profile import EXPERT_UNITS, Profile, product_name
from sim.cost.roofline import RooflineCost
from sim.engine.plan import IterationPlan
from sim.specs.expert_layout import ALL_GATHER, GPUS_OF_A_NODE, ExpertLayout
from sim.specs.expert_loads import ExpertLoads
from sim.specs.hardware import HardwareSpec
from sim.specs.models import ModelSpec

CHOICE_BYTES = 8
"""Of a token's choice of an expert that is sent with it: its number and its weight."""
LINK_BYTES_PER_S = 47e9
"""Between nodes, of each GPU (an assumption): what DeepEP reaches over 400 Gbit/s (`sim/cost/deepep.json`)."""
KNOWN_TOKENS = sorted({round(2 ** (i / 4)) for i in range(80)})
"""Tokens for which the slowest GPU is drawn; between them its seconds are interpolated."""


class SpreadExpertsCost(RooflineCost):
    """Form `roofline` with experts spread as `layout` says; its tensor-parallel group is that of a rank."""

    others_s = 0.0
    """What the other ranks make the next iteration longer than if all were alike, s: `set_together`."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, layout: ExpertLayout) -> None:
        self.layout = layout
        self._experts_s: dict[int, float] = {}
        self._drawn_s: dict[int, float] = {}
        super().__init__(model, hardware, profile, layout.tp)
        self._set_exchange(model, hardware, profile)

    def _set_experts(self, model: ModelSpec, profile: Profile) -> None:
        moe, layout = model.moe, self.layout
        assert moe
        timed = profile.experts(model.expert_quantization)
        constants = _as_products(model, profile) if timed is None else timed
        self.idle_share = 1 - moe.experts_per_token / moe.num_experts
        self.expert_layers, self.expert_exponent = moe.num_moe_layers, constants["expert_roofline_exponent"]
        self.expert_least_s = moe.num_moe_layers * constants["expert_launch_s"]
        # Of all layers: of a token's rows, of all experts, and of what a token's rows read and write.
        split = layout.width_split
        self.expert_s_per_token = model.routed_flops_per_token / split / constants["expert_flops_per_s"]
        self.expert_weights_s = model.routed_weight_bytes / split / constants["expert_bytes_per_s"]
        moved_bytes = model.routed_activation_bytes_per_token(split)
        if layout.expert_parallel:
            summed_bytes = moe.num_moe_layers * moe.experts_per_token * model.hidden_size * ACTIVATION_BYTES
            moved_bytes = moved_bytes / layout.gpus + (1 - 1 / layout.gpus) * summed_bytes
        self.expert_activation_s_per_token = moved_bytes / constants["expert_activation_bytes_per_s"]
        self.loads = ExpertLoads(layout, moe.num_experts, moe.experts_per_token)
        # Of one row, and of one expert.
        self.expert_s_per_row = self.expert_s_per_token / moe.experts_per_token
        self.weights_s_per_expert = self.expert_weights_s / moe.num_experts

    def _set_exchange(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile) -> None:
        self.deepep: tuple[DeepEP, DeepEP] | None = None
        """Where all ranks decode, and where any prefills; None: the collectives."""
        layout = self.layout
        if layout.backend != ALL_GATHER:
            decode, prefill = (
                DeepEP(name, model, hardware.name, layout) for name in (layout.backend, layout.prefill_backend)
            )
            self.deepep = decode, prefill
        moe, ranks, value = model.moe, layout.ranks, profile.value
        assert moe
        combined = model.hidden_size * ACTIVATION_BYTES
        self.exchanged_bytes = combined + CHOICE_BYTES * moe.experts_per_token, combined
        """Of a token, in the all-gather and in the reduce-scatter."""
        points = [(found or {}).get(str(ranks)) for found in (profile.all_gather, profile.reduce_scatter)]
        self.exchange_grids = [grid_of(found) if found else None for found in points]
        self.exchange_s_per_byte = (ranks - 1) / ranks / value("allreduce_bytes_per_s")
        # A node's links bring what others have; without expert parallelism to each of a rank's GPUs by itself.
        nodes = ceil(layout.gpus / GPUS_OF_A_NODE)
        node_bytes_per_s = GPUS_OF_A_NODE * LINK_BYTES_PER_S / (1 if layout.expert_parallel else layout.tp)
        self.exchange_s_per_byte = max(self.exchange_s_per_byte, (1 - 1 / nodes) / node_bytes_per_s)
        self.exchange_fixed_s = value("allreduce_launch_s") + (ranks - 1) * value("allreduce_latency_s")
        self.exchange_chunk_s = value("allreduce_chunk_s")

    def exchange_s(self, tokens: int) -> float:
        """Dispatch and combine of `tokens` tokens of all ranks by collectives, in all layers, s; 0 by DeepEP."""
        if self.layout.ranks == 1 or self.deepep:
            # Of one rank the group's all-reduce sums what its GPUs' experts found.
            return 0.0
        seconds = 0.0
        # Not `sum`, of which mypyc makes an integer where it is multiplied by one.
        for size, grid in zip(self.exchanged_bytes, self.exchange_grids, strict=True):
            seconds += self._collective_s(tokens * size, grid)
        return self.expert_layers * seconds

    def _collective_s(self, num_bytes: float, grid: Grid | None) -> float:
        if grid is not None:
            most = grid[0][-1]
            return value_at(grid, (num_bytes,)) * max(1.0, num_bytes / float(most))
        moved_s = self.exchange_s_per_byte * num_bytes
        return self.exchange_fixed_s + moved_s + 2 * sqrt(self.exchange_chunk_s * moved_s)

    def spread_s(self, tokens: int, most: int, *, prefills: bool = False) -> float:
        """Routed experts of all layers, dispatch and combine included, s.

        Args:
            tokens: of all ranks.
            most: of one rank.
            prefills: whether any rank does.
        """
        seconds = self._experts_s.get(tokens)
        if seconds is None:
            seconds = self._experts_s[tokens] = self._slowest_s(tokens) + self.exchange_s(tokens)
        return seconds + self.expert_layers * self.deepep[prefills].seconds(most) if self.deepep else seconds

    def experts_s(self, tokens: int) -> float:
        """The same where every rank has `tokens` tokens, as if all decoded, s."""
        return self.spread_s(self.layout.ranks * tokens, tokens)

    def _slowest_s(self, tokens: int) -> float:
        """Routed experts of the slowest GPU, s."""
        if not tokens:
            return 0.0
        fixed_s = tokens * self.expert_activation_s_per_token + self.expert_least_s
        if not self.layout.expert_parallel:
            met_s = self.expert_weights_s * (1 - self.idle_share**tokens)
            return ridge(tokens * self.expert_s_per_token, met_s, self.expert_exponent) + fixed_s
        above = bisect_left(KNOWN_TOKENS, tokens)
        if above == len(KNOWN_TOKENS):
            return self._drawn(KNOWN_TOKENS[-1]) * tokens / KNOWN_TOKENS[-1] + fixed_s
        high = KNOWN_TOKENS[above]
        if high == tokens:
            return self._drawn(high) + fixed_s
        low = KNOWN_TOKENS[above - 1]
        weight = (tokens - low) / (high - low)
        return (1 - weight) * self._drawn(low) + weight * self._drawn(high) + fixed_s

    def _drawn(self, tokens: int) -> float:
        """Products of the GPU whose experts take longest, a mean over draws, s."""
        seconds = self._drawn_s.get(tokens)
        if seconds is None:
            rows, met = self.loads.drawn(tokens)
            exponent = self.expert_exponent
            powers = (rows * self.expert_s_per_row) ** exponent + (met * self.weights_s_per_expert) ** exponent
            each_s = powers ** (1 / exponent)
            seconds = self._drawn_s[tokens] = float(each_s.max(axis=1).mean())
        return seconds

    # -- ranks that differ -----------------------------------------------------------------------------------------

    def set_together(self, plans: Sequence[IterationPlan | None], idle_tokens: int = 1) -> list[float]:
        """`others_s` of each rank where they iterate together; one without a plan computes `idle_tokens` of nothing."""
        own = [0 if plan is None else plan.num_tokens for plan in plans]
        computed = [max(idle_tokens, tokens) for tokens in own]
        alone = all(plan is None or not plan.prefill_tokens for plan in plans)
        if max(computed) <= (self.most_captured if alone else min(self.most_captured, self.captured_tokens)):
            # Graphs are of one size on all ranks.
            computed = [self._padded(max(computed)) if alone else max(computed)] * len(own)
        spread_s = self.spread_s(sum(computed), max(computed), prefills=not alone)
        found = []
        for plan, tokens, run in zip(plans, own, computed, strict=True):
            if plan is None or not tokens:
                found.append(0.0)
                continue
            counted = tokens if plan.prefill_tokens else self._padded(tokens)
            added_s = self.linear_s(run) - self.linear_s(counted)
            added_s += self.all_reduce_s(run) - self.all_reduce_s(counted)
            found.append(added_s + (spread_s - self.experts_s(run)))
        return found

    def _padded(self, tokens: int) -> int:
        return tokens if self.padded is None else self.padded(tokens)

    def iteration_s(self, plan: IterationPlan) -> float:
        if not self.others_s or not self.launches_s:
            return super().iteration_s(plan) + self.others_s
        # What launching takes is taken once, whatever the others add.
        launches_s, self.launches_s = self.launches_s, 0.0
        seconds = super().iteration_s(plan) + self.others_s
        self.launches_s = launches_s
        captured = self.captured_tokens if plan.prefill_tokens else self.captured_decodes
        return seconds if plan.num_tokens <= captured else max(seconds, launches_s)


def _as_products(model: ModelSpec, profile: Profile) -> dict[str, float]:
    """Constants of experts as those of products of their format, where no kernel of experts was timed."""
    kind = model.product_quantization
    values = {
        "expert_flops_per_s": profile.value(product_name(kind, "flops_per_s")),
        "expert_bytes_per_s": profile.value("hbm_bytes_per_s"),
        "expert_roofline_exponent": profile.value(product_name(kind, "roofline_exponent")),
        "expert_activation_bytes_per_s": profile.value("hbm_bytes_per_s"),
        # Of the five kernels that a layer's overhead is of.
        "expert_launch_s": profile.value("layer_overhead_s") / 5,
    }
    assert values.keys() == EXPERT_UNITS.keys()
    return values
