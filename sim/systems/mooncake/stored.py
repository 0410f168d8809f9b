"""`StoredMemory`: paged blocks for prompts whose beginning a store of the cluster may have (Mooncake).

What a prompt has in its engine's host memory is granted before it arrives here. It is loaded layer by layer while the
rest is computed. Prompts that were computed are told to the store, which keeps copies.
"""

from collections.abc import Callable
from typing import ClassVar

from sim.engine.changes import Streamed
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.memory import Memory
from sim.parts.needs import Need
from sim.systems.mooncake.preset import ConductorOptions
from traces.request import Request


def unheard(request: Request) -> None:
    """Not told on."""


class StoredMemory(Memory):
    """Blocks on demand; a prompt starts with the tokens `granted` to its request, which are in the host's memory."""

    name: ClassVar[str] = "stored"
    options: ClassVar[type | None] = ConductorOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("stage", "is for engines that prefill for others", names=("hand-over",)),
        Need("eviction", "computes victims again", lacks="moves_whole"),
    )
    caches_prefixes = True

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.granted: dict[int, int] = {}
        """Tokens by request id, whole blocks and never all of a prompt."""
        self.on_computed: Callable[[Request], None] = unheard
        """Hears of requests whose prompt's KV is complete."""
        self._loading = 0

    def cached_tokens(self, seq: Sequence) -> int:
        return self.granted.get(seq.request.request_id, 0)

    def place(self, seq: Sequence, num_tokens: int) -> None:
        self.take(seq, num_tokens)
        tokens = self.granted.pop(seq.request.request_id, 0)
        self.count_hits(seq, tokens)
        if tokens:
            seq.num_computed = tokens
            self._loading += tokens // self.block_size

    def complete(self, plan: IterationPlan) -> None:
        if self._loading:
            plan.streamed += (Streamed(1, self._loading, 0),)
            self._loading = 0

    def parked(self, seq: Sequence) -> None:
        self.on_computed(seq.request)

    def left(self, seq: Sequence) -> None:
        if seq.num_generated >= seq.output_tokens == 1:
            # It needed no other engine.
            self.on_computed(seq.request)

    def forget(self, seq: Sequence) -> None:
        self.granted.pop(seq.request.request_id, None)
