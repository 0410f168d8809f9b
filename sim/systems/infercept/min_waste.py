"""`MinWaste`: KV of a sequence that calls a tool is kept, dropped or swapped, whichever wastes least GPU memory.

InferCept's waste (Abhyankar et al., ICML 2024, Sections 3 and 4), in token-seconds of GPU memory that serves none, for
a sequence of C tokens beside O tokens of others:

    preserve   T_tool C
    discard    T_fwd(C) C / 2 + max(0, T_fwd(C) - n T_iter) O      computed again in n chunks beside the decodes
    swap       2 T_swap(C) O, and 0 where iterations hide it       out and back

Where T_tool is not known it is taken to be as long again as the tool has worked so far: 0 at first, so KV is preserved
until that has wasted what the better of the other two would (`Calling.rethought_s`).
"""

from math import ceil
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from sim.engine.changes import D2H, H2D, Direction
from sim.engine.sequence import CallingSequence
from sim.parts.stage.tool_call_options import Kept, time_to_live
from sim.parts.stage.tool_calls import Calling, ToolCalls
from sim.systems.infercept.preset import InferCeptOptions

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class Waste(NamedTuple):
    """Of each way, token-seconds."""

    preserve: float
    discard: float
    swap: float


class MinWaste(ToolCalls):
    """Chooses by `waste`; what would waste most chooses first, as iterations hide few swaps."""

    name: ClassVar[str] = "min-waste"
    options: ClassVar[type | None] = InferCeptOptions

    @classmethod
    def build(cls, b: "Builder") -> Self:
        b.refuse_windows("stage=min-waste")
        options = b.options(InferCeptOptions)
        return cls(options, b)

    def __init__(self, options: InferCeptOptions, b: "Builder") -> None:
        self.by_waste = options.tool_kv == "min-waste"
        way = "preserve" if self.by_waste else options.tool_kv
        # Not by `*`, which mypyc hands on wrongly.
        kept, ttl_s = time_to_live(way, options.tool_ttl_s)
        super().__init__(kept, ttl_s, keeps_place=options.keeps_place)
        self.known_durations = options.known_durations
        self.cost, self.block_bytes = b.deployment.cost, b.limits.block_bytes
        self.num_layers, self.budget = b.deployment.model.num_layers, b.limits.max_num_batched_tokens

    def in_turn(self, begun: list[CallingSequence]) -> list[CallingSequence]:
        if not self.by_waste:
            return begun

        def least(seq: CallingSequence) -> float:
            waste = self.waste(seq, self.calling[seq].call.duration_s if self.known_durations else 0.0)
            return min(waste.preserve, waste.discard)

        return sorted(begun, key=least, reverse=True)

    def choose(self, seq: CallingSequence, calling: Calling, now_s: float) -> Kept:
        if not self.by_waste:
            return super().choose(seq, calling, now_s)
        tool_s = calling.call.duration_s if self.known_durations else max(0.0, now_s - calling.since_s)
        waste = self.waste(seq, tool_s)
        can_swap = self.paged.may_leave(seq) and self.paged.can_swap_out(seq)
        least, way = min((waste.discard, 1), (waste.swap, 0)) if can_swap else (waste.discard, 1)
        if waste.preserve < least * (1 - 1e-9):
            if not self.known_durations:
                calling.rethought_s = calling.since_s + least / seq.num_tokens
            return "preserve"
        return "discard" if way else "swap"

    def waste(self, seq: CallingSequence, tool_s: float) -> Waste:
        """Of one whose KV is on the GPU, where the tool takes `tool_s`."""
        cost, batch = self.cost, self.batch
        tokens, others, blocks = seq.num_tokens, batch.context_tokens, self.paged.held_blocks(seq)
        forward_s = cost.prefill_s(tokens)
        iteration_s = cost.decode_steps(len(batch.members), others)[0] if batch.members else 0.0
        out_s, back_s = (self._copy_s(blocks, direction) for direction in (D2H, H2D))
        # Copies that are under way go first.
        is_hidden = self._copy_s(blocks + self.paged.releasing, D2H) <= iteration_s
        beside_s = max(0.0, forward_s - ceil(tokens / self.budget) * iteration_s)
        return Waste(
            preserve=tool_s * tokens,
            discard=forward_s * tokens / 2 + beside_s * others,
            swap=0.0 if is_hidden else (out_s + back_s) * others,
        )

    def _copy_s(self, blocks: int, direction: Direction) -> float:
        copies = self.cost.num_copies(blocks, self.num_layers)
        return self.cost.copy_s(blocks * self.block_bytes, copies, direction)
