"""`VllmBlocks`: paged memory whose blocks are those of vLLM's `KVCacheManager`, taken as the parts decide.

Nothing is counted twice: what is free, cached and hit is vLLM's own answer. Blocks of a sequence that ends are given
back by vLLM; one that is to be computed again is preempted in vLLM at once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from sim.engine.limits import Limits
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from sim.kv.block_pool import BlockPool
from sim.kv.paged import PagedMemory

if TYPE_CHECKING:
    # Where types are checked there is no vLLM.
    Request = KVCacheBlocks = KVCacheManager = Any


class VllmPool(BlockPool):
    """vLLM's free blocks; the memory takes them and gives them back."""

    __slots__ = ("_pool",)

    def __init__(self, pool: Any, num_blocks: int) -> None:  # noqa: ANN401
        self._pool = pool
        super().__init__("GPU KV blocks", num_blocks)

    @property
    def free(self) -> int:  # type: ignore[override]
        """Cached blocks that no request holds included."""
        return self._pool.get_num_free_blocks()

    @free.setter
    def free(self, value: int) -> None:
        """vLLM's own count alone stands."""

    def allocate(self, count: int) -> None:
        raise InvariantError("vLLM's blocks are taken for a request, not by count")

    release = allocate


class VllmBlocks(PagedMemory):
    """Blocks of one group of layers that keep the whole context.

    Args:
        limits: of the engine; `num_gpu_blocks` without vLLM's null block.
        manager: vLLM's.
        preempt: preempts a request of vLLM's that runs.
    """

    name: ClassVar[str] = "paged"
    can_swap = False

    def __init__(self, limits: Limits, manager: "KVCacheManager", preempt: "Callable[[Request], None]") -> None:
        super().__init__(limits)
        self._allocate, self._manager, self._preempt = manager.allocate_slots, manager, preempt
        self.gpu = VllmPool(manager.block_pool, limits.num_gpu_blocks)
        self.caches_prefixes = limits.enable_prefix_caching
        self.requests: dict[Sequence, Request] = {}
        """vLLM's, of sequences that have not ended."""
        self.placed: list[Request] = []
        """Those that have started in this step, in order."""
        self._given: dict[str, KVCacheBlocks] = {}
        # What was looked up since blocks last changed hands.
        self._hits: dict[Sequence, tuple[KVCacheBlocks, int]] = {}

    def given(self, request_id: str) -> "KVCacheBlocks | None":
        """The blocks that a request has been given since this was last asked."""
        return self._given.pop(request_id, None)

    def _take(self, request: "Request", num_tokens: int, **hits: Any) -> None:  # noqa: ANN401
        blocks = self._allocate(request, num_tokens, has_scheduled_reqs=False, **hits)
        if blocks is None:
            raise InvariantError(f"vLLM has no blocks for {num_tokens} tokens of {request.request_id}")
        self._hits.clear()
        before = self._given.get(request.request_id)
        self._given[request.request_id] = blocks if before is None else before + blocks

    # -- prompts -----------------------------------------------------------------------------------------------------

    def prepare(self, now_s: float) -> None:
        self._hits.clear()
        self.placed.clear()

    def _hit(self, seq: Sequence) -> "tuple[KVCacheBlocks, int]":
        found = self._hits.get(seq)
        if found is None:
            blocks, num_tokens, _ = self._manager.get_computed_blocks(self.requests[seq])
            found = self._hits[seq] = blocks, num_tokens
        return found

    def cached_tokens(self, seq: Sequence) -> int:
        return self._hit(seq)[1]

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        (hits,) = self._hit(seq)[0].blocks
        # Idle hits are free blocks as well, until they are taken.
        return self.blocks_holding(num_tokens) - len(hits) + sum(block.ref_cnt == 0 for block in hits)

    def place(self, seq: Sequence, num_tokens: int) -> None:
        request = self.requests[seq]
        blocks, hit = self._hit(seq)
        self._take(
            request, num_tokens - hit, num_new_computed_tokens=hit, new_computed_blocks=blocks, delay_cache_blocks=True
        )
        request.num_computed_tokens = seq.num_computed = hit
        seq.num_blocks = self.blocks_holding(num_tokens)
        self.placed.append(request)
        self.count_hits(seq, hit)

    def take_chunk(self, seq: Sequence, num_tokens: int) -> None:
        if self.blocks_missing(seq, num_tokens) > 0:
            request = self.requests[seq]
            self._take(request, num_tokens - request.num_computed_tokens, delay_cache_blocks=True)
            seq.num_blocks = self.blocks_holding(num_tokens)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        request = self.requests[seq]
        self._manager.cache_blocks(request, min(num_tokens, request.num_tokens))
        self._hits.clear()

    # -- decodes -----------------------------------------------------------------------------------------------------

    def take_decodes(self, num_blocks: int) -> None:
        for seq in self.batch.members:
            self.append(seq)

    def append(self, seq: Sequence) -> None:
        # A token that neither begins a block nor fills one takes nothing, and is hashed with none.
        if self.batch.num_tokens_of(seq) % self.block_size <= 1:
            self._take(self.requests[seq], 1)

    def take_next(self, seq: Sequence) -> bool:
        if self.decode_blocks_of(seq) > self.gpu.free:
            return False
        self.append(seq)
        return True

    # -- the way out -------------------------------------------------------------------------------------------------

    def may_leave(self, seq: Sequence) -> bool:
        return not self.caches_prefixes

    def release(self, seq: Sequence) -> None:
        request = self.requests[seq]
        if not request.is_finished():
            self._preempt(request)
        self._given.pop(request.request_id, None)
        self._hits.clear()
        seq.num_blocks = 0
