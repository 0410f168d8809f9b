"""`TieringConnector`: the OffloadingConnector with files behind the host, as vLLM 0.33's `TieringOffloadingManager`.

What has been stored on the host is written to files (a cascade). A request whose prefix goes on there waits until it
has been brought to the host (a promotion), as far as there is room, and is then loaded as from the host. All goes
through the host: nothing is copied between GPU and files.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sim.engine.changes import Move, Tier
from sim.engine.limits import Limits, TierCounters
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.kv.memory import ALL_LAYERS, Memory
from sim.kv.offload_options import OffloadOptions
from sim.kv.tiers.connector import OffloadingConnector
from sim.kv.tiers.jobs import Job, Offloaded, ranges_of
from sim.kv.tiers.storage import Lookups, Storage
from sim.kv.tiers.worth import Worth

if TYPE_CHECKING:
    from sim.systems.builder import Builder


def connector_of(b: "Builder") -> OffloadingConnector:
    """Of an engine, by its options. UserError for models of which some layers keep a window."""
    b.refuse_windows("--kv-offloading-size", "; --disable-hybrid-kv-cache-manager keeps whole prefixes")
    options = b.offloading
    if options.storage_space and options.store_threshold > 1:
        raise UserError("store-threshold: with files behind the host vLLM stores at the first offer; leave it out")
    kind = TieringConnector if options.storage_space else OffloadingConnector
    return kind(options, b.limits, b.block_bytes, Worth.of(b, options.load_s_per_block))


def share_storage(memories: Iterable[Memory]) -> None:
    """Of engines that have not begun: the files of the first are those of all."""
    ends = [memory.backing or memory for memory in memories]
    connectors = [found for one in ends if isinstance(found := getattr(one, "connector", None), TieringConnector)]
    for connector in connectors[1:]:
        connector.share(connectors[0].storage)


class TieringConnector(OffloadingConnector):
    """The scheduler's side of it."""

    def __init__(self, options: OffloadOptions, limits: Limits, block_bytes: float, worth: Worth | None) -> None:
        super().__init__(options, limits, block_bytes, worth)
        self.drive = options.drive(block_bytes)
        storage = Storage(options.num_stored_chunks(block_bytes), self.chain)
        self.share(storage)
        self.storage_tier = TierCounters(num_blocks=(storage.num_chunks or 0) * self.blocks_per_chunk)
        self._copies: dict[Move, list[int]] = {}
        self._landed: list[Move] = []
        self._cascades: list[Move] = []
        # Chunks to be promoted once the step has asked for all, by request.
        self._promoted: dict[Offloaded, list[int]] = {}
        # That have ended, and have stores under way.
        self._leaving: set[Offloaded] = set()
        self._answered = False

    def share(self, storage: Storage) -> None:
        """Before any request: files that other engines may have, too."""
        self.storage, self.chain, self.lookups = storage, storage.chain, Lookups(storage)

    @property
    def copies(self) -> bool:
        # A look-up may move chunks, at any step.
        return True

    @property
    def wants_step(self) -> bool:
        return self._answered or bool(self._finished or self.stores or self._cascades)

    # -- promotions --------------------------------------------------------------------------------------------------

    def _find(self, request: Offloaded, place: int) -> bool | None:
        found = super()._find(request, place)
        if found is not None:
            return found
        key = request.access.keys[place]
        there = self.lookups.find(request, key)
        if there is None:
            return False
        if not there or key not in self.storage or self.cache.offer(request.access, [place]) is None:
            return None
        self._promoted.setdefault(request, []).append(place)
        return False

    def begin(self) -> list[Move]:
        for move in self._landed:
            keys = self._copies.pop(move)
            if move.target is Tier.HOST:
                self.cache.written(keys)
            else:
                self.cache.done_reading(keys)
        self._landed, self._answered = [], False
        cascades, self._cascades = self._cascades, []
        return [*super().begin(), *cascades]

    def build(
        self,
        plan: IterationPlan,
        beside: list[Move],
        scheduled: Callable[[], Iterable[tuple[Sequence, int]]],
    ) -> str:
        ended = list(self._ended)
        told = super().build(plan, beside, scheduled)
        for request, places in self._promoted.items():
            keys = [request.access.keys[place] for place in places]
            self.storage.read(keys)
            beside.append(self._copy(request, places, Tier.DISK, Tier.HOST, keys))
            self.storage_tier.num_loads += 1
            self.storage_tier.hit_tokens += len(places) * self.chunk_tokens
        self._promoted = {}
        self._answered = self.lookups.answer()
        for request in ended:
            self._leave(request)
        return told

    def _copy(self, request: Offloaded, places: list[int], source: Tier, target: Tier, keys: list[int]) -> Move:
        """A copy of the chunks at `places`, for which those of `keys` stay on the host."""
        blocks, size = ranges_of(places, self.blocks_per_chunk), self.block_size
        count = len(places) * self.blocks_per_chunk
        seconds = self.drive.read_s(count) if source is Tier.DISK else self.drive.write_s(count)
        tokens = blocks[0].start * size, blocks[-1].stop * size
        move = Move(request.seq, ALL_LAYERS, *tokens, source, target, count, 0, True, seconds / count)
        self._copies[move] = keys
        return move

    # -- cascades ----------------------------------------------------------------------------------------------------

    def transfer_done(self, move: Move) -> None:
        if not move.uses_disk:
            super().transfer_done(move)
            return
        self._landed.append(move)
        if move.target is Tier.DISK:
            self.storage_tier.evicted_blocks += self.storage.write(self._copies[move]) * self.blocks_per_chunk

    def report(self, finished: list[Move]) -> bool:
        stored = [self._jobs[move] for move in finished if move.target is Tier.HOST]
        reported = super().report(finished)
        for job in stored:
            self._cascade(job)
            if job.owner in self._leaving:
                self._leave(job.owner)
        return reported

    def _cascade(self, job: Job) -> None:
        """Write what has been stored to files, but for chunks that have theirs; all stay on the host meanwhile."""
        keys = job.keys
        new = [place for place, key in zip(job.places, keys, strict=True) if key not in self.storage]
        if new:
            self.cache.pin(keys)
            self._cascades.append(self._copy(job.owner, new, Tier.HOST, Tier.DISK, keys))
            self.storage_tier.stored_blocks += len(new) * self.blocks_per_chunk

    def _leave(self, request: Offloaded) -> None:
        if request.jobs:
            self._leaving.add(request)
        else:
            self._leaving.discard(request)
            self.lookups.forget(request)

    def repeats(self, steps: int, running: Iterable[Sequence], num_tokens_of: Callable[[Sequence], int]) -> int:
        return 1 if self._cascades or self._landed or self._answered else super().repeats(steps, running, num_tokens_of)
