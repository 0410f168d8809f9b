"""`OffloadingConnector`: vLLM 0.33's (`kv_connector/v1/offloading/scheduler.py`), decision for decision.

Each step, chunks that the scheduled requests have filled are stored on the host, unless they are there; their copies
start with the next step. A request whose prefix goes on there beyond what the GPU has is admitted to wait until that is
loaded, at any price. Blocks are given back without waiting for their stores: a sequence that takes one whose store is
under way waits for it, and so does a step that preempts. The scheduler sees a copy's end a step after it has happened.
"""

from collections.abc import Callable, Iterable

from sim.engine.changes import Move, Tier
from sim.engine.limits import Limits, TierCounters
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.index.block_chain import BlockChain
from sim.kv.memory import ALL_LAYERS
from sim.kv.offload_options import OffloadOptions
from sim.kv.tiers.host_cache import HostCache
from sim.kv.tiers.jobs import Job, Offloaded, ranges_of
from sim.kv.tiers.replacement import Access
from sim.kv.tiers.worth import Worth


class OffloadingConnector:
    """The scheduler's side of it.

    Args:
        options: chunks and their copies.
        limits: of the engine. With a prefix cache a request that finds a chunk being loaded for another waits for that.
        block_bytes: of a block, on all GPUs together.
        worth: what is loaded all the same, by price; None: that is not counted.
    """

    def __init__(self, options: OffloadOptions, limits: Limits, block_bytes: float, worth: Worth | None) -> None:
        self.cache = HostCache(options.num_chunks(block_bytes), options.eviction_policy, options.store_threshold)
        self.block_size, self.blocks_per_chunk = limits.block_size, options.blocks_per_chunk
        self.chunk_tokens = self.block_size * self.blocks_per_chunk
        self.prompts_only, self.shares_loads = not options.offload_outputs, limits.enable_prefix_caching
        self.load_s_per_block, self.store_s_per_block = options.load_s_per_block, options.store_s_per_block
        self.schedules_ahead = False
        """Whether copies wait for steps that are in flight when they are decided."""
        self.chain = BlockChain(self.block_size)
        self.worth = worth
        self.tier = TierCounters(num_blocks=self.cache.num_chunks * self.blocks_per_chunk)
        self.loaded: set[Sequence] = set()
        """Whose loads have ended, as far as the scheduler has seen."""
        self.fenced: dict[Job, None] = {}
        """Stores under way of requests that have ended: their blocks may be handed out."""
        self._requests: dict[Sequence, Offloaded] = {}
        self._block_keys: dict[Sequence, tuple[int, ...]] = {}
        # Admitted requests that may have chunks to store.
        self._filling: dict[Sequence, Offloaded] = {}
        # That ended since the last step, and what they have yet to store.
        self._ended: dict[Offloaded, Job | None] = {}
        self._being_loaded: set[int] = set()
        self._jobs: dict[Move, Job] = {}
        self._loads: list[Job] = []
        self.stores: list[Job] = []
        """Decided in this step, to begin with the next."""
        self._flushed: dict[Job, None] = {}
        self._finished: list[Move] = []
        self._refused = False

    @property
    def copies(self) -> bool:
        """Whether any copy is under way, as far as the scheduler has seen."""
        return bool(self._jobs)

    # -- what requests have ------------------------------------------------------------------------------------------

    def block_keys(self, seq: Sequence) -> tuple[int, ...]:
        """One key for each block of a sequence."""
        keys = self._block_keys.get(seq)
        if keys is None:
            keys = self._block_keys[seq] = self.chain.of(seq)
        return keys

    def _of(self, seq: Sequence) -> Offloaded:
        found = self._requests.get(seq)
        if found is None:
            last = self.blocks_per_chunk - 1
            found = Offloaded(seq, Access(self.block_keys(seq)[last :: self.blocks_per_chunk]))
            self._requests[seq] = found
        return found

    def forget(self, seq: Sequence) -> None:
        """`seq`, which holds nothing, will not come back."""
        self._requests.pop(seq, None)
        self._block_keys.pop(seq, None)

    # -- loads -------------------------------------------------------------------------------------------------------

    def lookup(self, seq: Sequence, num_local: int) -> int | None:
        """Tokens to load beyond the `num_local` that the GPU has; None: not to be said yet, ask in the next step."""
        request, size = self._of(seq), self.chunk_tokens
        request.num_offered = 0
        if request.jobs:
            return None
        first, end = num_local // size, seq.num_tokens // size
        if end * size - num_local < size:
            return 0
        place, keys, pending = first, request.access.keys, False
        while place < end and (found := self._find(request, place)) is not None:
            pending |= not found
            place += 1
        if place == first:
            return 0
        if pending:
            return None
        tokens = place * size - num_local
        if tokens < size:
            return 0
        if self._being_loaded and not self._being_loaded.isdisjoint(keys[first:place]):
            return None
        return tokens

    def _find(self, request: Offloaded, place: int) -> bool | None:
        """Whether a chunk can be read from the host; None: it is not there, nor on its way."""
        chunk = self.cache.get(request.access.keys[place])
        return None if chunk is None else chunk.num_copies >= 0

    def load(self, seq: Sequence, num_local: int, num_tokens: int) -> None:
        """Copy the `num_tokens` tokens after the first `num_local` to blocks that `seq` has been given."""
        request, end = self._of(seq), num_local + num_tokens
        places = range(num_local // self.chunk_tokens, end // self.chunk_tokens)
        request.num_offered = places.stop
        self.cache.read(request.access, places)
        blocks = range(num_local // self.block_size, end // self.block_size)
        move = Move(seq, ALL_LAYERS, num_local, end, Tier.HOST, Tier.GPU, len(blocks), 0, True, self.load_s_per_block)
        job = Job(request, list(places), [blocks])
        self._begin(job, move)
        if self.shares_loads:
            self._being_loaded.update(job.keys)
        self._loads.append(job)
        self.tier.num_loads += 1
        if self.worth is not None:
            saved_s = self.worth.recompute_s(seq, num_local, end) - self.worth.load_s(len(blocks))
            self.tier.saved_s += max(0.0, saved_s)
            self.tier.lost_s += max(0.0, -saved_s)

    # -- stores ------------------------------------------------------------------------------------------------------

    def admitted(self, seq: Sequence) -> None:
        """`seq` runs from this step on."""
        self._filling[seq] = self._of(seq)

    def preempted(self, seq: Sequence) -> None:
        """`seq` loses its blocks: this step waits for its stores."""
        self._filling.pop(seq, None)
        self._flushed.update(self._of(seq).jobs)

    def finished(self, seq: Sequence) -> list[Job]:
        """`seq` ends; the jobs, under way or yet wanted, that have to hear when its blocks are handed out."""
        request = self._requests.pop(seq)
        del self._block_keys[seq]
        self._filling.pop(seq, None)
        self.fenced.update(request.jobs)
        jobs, wanted = list(request.jobs), None
        end = self._last_chunk(seq, max(seq.request.prompt_tokens, seq.num_tokens - 1))
        if end > request.num_offered:
            places = list(range(request.num_offered, end))
            wanted = Job(request, places, ranges_of(places, self.blocks_per_chunk))
            jobs.append(wanted)
            self.fenced[wanted] = None
        self._ended[request] = wanted
        return jobs

    def reused(self, job: Job, blocks: range) -> None:
        """Blocks whose store may be under way are handed out again, their content kept or not."""
        if job.move is None:
            job.reused.append(blocks)
        elif job in self.fenced and job.reads(blocks):
            self._flushed[job] = None

    def _last_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """Chunks that may be stored once so many tokens are computed."""
        if self.prompts_only:
            num_tokens = min(num_tokens, seq.request.prompt_tokens)
        return num_tokens // self.chunk_tokens

    def _store(self, request: Offloaded, end: int, job: Job | None = None) -> bool:
        """Offer what comes before chunk `end`; whether anything is stored, as `job` where there is one already."""
        places = range(request.num_offered, end)
        taken = self.cache.offer(request.access, places) if places else []
        if taken is None:
            self._refused = True
            return False
        request.num_offered = max(request.num_offered, end)
        if not taken:
            return False
        blocks, size = ranges_of(taken, self.blocks_per_chunk), self.block_size
        count, tokens = len(taken) * self.blocks_per_chunk, (blocks[0].start * size, blocks[-1].stop * size)
        move = Move(request.seq, ALL_LAYERS, *tokens, Tier.GPU, Tier.HOST, count, 0, True, self.store_s_per_block)
        job = job or Job(request, taken, blocks)
        job.places, job.blocks = taken, blocks
        self._begin(job, move)
        self.stores.append(job)
        self.tier.stored_blocks += count
        self.tier.evicted_blocks = self.cache.num_evicted * self.blocks_per_chunk
        return True

    def _begin(self, job: Job, move: Move) -> None:
        job.move = move
        self._jobs[move] = job
        job.owner.jobs[job] = None

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self) -> list[Move]:
        """The copies that a step starts with: what the one before it decided to store."""
        stores, self.stores = self.stores, []
        return self._started(stores, self.store_s_per_block)

    def _started(self, jobs: list[Job], s_per_block: float | None) -> list[Move]:
        """The copies that begin with the computation, but for those that take no time: they have ended by then."""
        moves = [job.move for job in jobs if job.move is not None]
        if s_per_block == 0.0 and not self.schedules_ahead:
            self._finished += moves
            return []
        return moves

    def build(
        self, plan: IterationPlan, beside: list[Move], scheduled: Callable[[], Iterable[tuple[Sequence, int]]]
    ) -> str:
        """What the step copies, which has decided everything else; in words.

        `beside` are copies that it starts with. `scheduled` tells what computes, in order, and how many tokens of each
        are computed then.
        """
        self._refused = False
        if self._filling:
            for seq, num_tokens in scheduled():
                request = self._filling.get(seq)
                if request is not None:
                    self._store(request, self._last_chunk(seq, num_tokens))
                    if self.prompts_only and request.num_offered >= self._last_chunk(seq, seq.request.prompt_tokens):
                        del self._filling[seq]
        for request, job in self._ended.items():
            if job is not None and not self._store(request, job.places[-1] + 1, job):
                del self.fenced[job]
            elif job is not None and any(map(job.reads, job.reused)):
                self._flushed[job] = None
            self.cache.finish(request.access)
        self._ended = {}
        text = "".join((
            _words("load", ((job.owner.seq, job.num_tokens(self.block_size)) for job in self._loads)),
            _words("store", ((job.owner.seq, job.num_blocks) for job in self.stores)),
            f" flush {len(self._flushed)}" if self._flushed else "",
        ))  # fmt: skip
        if plan.chunks or plan.num_decodes:
            plan.after = tuple(job.move for job in self._loads if job.move is not None)
        else:
            plan.after = tuple(self._started(self._loads, self.load_s_per_block))
        plan.awaited = tuple(job.move for job in self._flushed if job.move is not None)
        if self._flushed:
            # What is awaited starts at once.
            beside += self._started([job for job in self.stores if job in self._flushed], self.store_s_per_block)
            self.stores = [job for job in self.stores if job not in self._flushed]
        self._loads, self._flushed = [], {}
        return text

    def transfer_done(self, move: Move) -> None:
        """A copy has ended; the scheduler does not see it before the step is over."""
        self._finished.append(move)

    @property
    def wants_step(self) -> bool:
        """Whether a step has something to do, though nothing computes: to hear of copies that ended, to begin some."""
        return bool(self._finished or self.stores)

    def get_finished(self) -> list[Move]:
        """The copies that have ended; a step hears of them."""
        finished, self._finished = self._finished, []
        return finished

    def report(self, finished: list[Move]) -> bool:
        """That step is over: let the scheduler see them; whether there were any."""
        for move in finished:
            job = self._jobs.pop(move)
            del job.owner.jobs[job]
            self.fenced.pop(job, None)
            if move.target is Tier.HOST:
                self.cache.written(job.keys)
            else:
                self.cache.done_reading(job.keys)
                self._being_loaded.difference_update(job.keys)
                self.loaded.add(move.seq)
        return bool(finished)

    def repeats(self, steps: int, running: Iterable[Sequence], num_tokens_of: Callable[[Sequence], int]) -> int:
        """For how many steps of `running`, which all decode, nothing is stored and no copy is seen to end."""
        if self.stores or self._finished or self.fenced or self._refused:
            return 1
        if not self.prompts_only:
            for seq in running:
                end = (self._of(seq).num_offered + 1) * self.chunk_tokens
                steps = min(steps, end - num_tokens_of(seq))
        return max(1, steps)


def _words(what: str, found: Iterable[tuple[Sequence, int]]) -> str:
    words = [f"{seq.request.request_id}:{count}" for seq, count in found]
    return f" {what} {' '.join(words)}" if words else ""
