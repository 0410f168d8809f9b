"""`StoredTreeMemory`: SGLang's tree with HiCache's storage (L3) behind the host.

What has been copied to the host is written to storage. A request that enters the queue asks it for what follows on its
longest cached prefix; what is there is read to the host, and loaded from there when the request is admitted. How long
an admission waits for that is `hicache_storage_prefetch_policy`. Asking, reading and writing are threads of SGLang's
controller; each does one thing after another, in batches that take a latency and their bytes' time.
Source: sglang 0.5.23, `managers/cache_controller.py`, `mem_cache/unified_radix_cache.py`, `storage_prefetch.py`;
times as its own storage backend `sim` has them.
"""

from collections import deque
from collections.abc import Generator, Iterable
from math import inf
from typing import TYPE_CHECKING

from sim.engine.limits import Limits, TierCounters
from sim.engine.sequence import Sequence
from sim.kv.index.block_chain import BlockChain
from sim.kv.memory import Memory
from sim.kv.tiers.storage import Storage
from sim.systems.sglang.memory import Copies, TreeMemory
from sim.systems.sglang.options import SglangOptions
from sim.systems.sglang.tree import Node, Pin

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

BATCH_PAGES = 128
"""Pages that are read or written together (`STORAGE_BATCH_SIZE`)."""
OCCUPIED_SHARE = 0.5
"""Of the host's pool, what prefetches may ask for at most before the next has to wait."""
TIE_S = 1e-9
PRIVATE_KEYS = 1 << 40
"""Of each engine that shares a storage."""

Job = Generator[float, None, None]
"""Says how long each of its parts takes, s, and does it when that is over."""


class Worker:
    """A thread that does one job after another."""

    def __init__(self) -> None:
        self.next_s = inf
        """When what it does ends."""
        self._job: Job | None = None
        self._queue: deque[tuple[float, Job]] = deque()

    def put(self, job: Job, now_s: float) -> None:
        self._queue.append((now_s, job))
        if self._job is None:
            self._start(now_s)

    def go_on(self) -> None:
        """`next_s` has come."""
        assert self._job is not None, "something ends"
        seconds = next(self._job, None)
        if seconds is None:
            self._job = None
            self._start(self.next_s)
        else:
            self.next_s += seconds

    def _start(self, at_s: float) -> None:
        self.next_s = inf
        while self._queue:
            put_s, job = self._queue.popleft()
            seconds = next(job, None)
            if seconds is not None:
                self._job, self.next_s = job, max(at_s, put_s) + seconds
                return


class Prefetch:
    """What one request has asked of storage: `keys` of pages after the first `start`, below `anchor` in the tree.

    `stored` are their keys in storage. Of them `hit` are there, `taken` have room on the host (None: not yet decided),
    `completed` have come.
    """

    def __init__(self, seq: Sequence, anchor: Node, start: int, keys: tuple[int, ...], stored: tuple[int, ...]) -> None:
        self.seq, self.anchor, self.start, self.keys, self.stored = seq, anchor, start, keys, stored
        self.pin: Pin | None = None
        self.hit = self.completed = 0
        self.taken: int | None = None
        self.is_terminated = self.is_late = False


class Asker:
    """What is remembered of a request that waits."""

    def __init__(self) -> None:
        self.prefetch: Prefetch | None = None
        self.attempts = 0
        self.matched = 0
        """Pages that it hit when it last asked."""
        self.deadline_s = inf
        self.is_late = False
        """The deadline has come: it asks no more."""
        self.retries = False
        self.stored_end: int | None = None
        """Where it is known that storage has what it asks for: up to this page."""
        self.due: int | None = None
        """In which pass over the queue it asks again."""


class StoredTreeMemory(TreeMemory):
    """The tree, and what the three threads do for it."""

    @classmethod
    def build(cls, b: "Builder") -> Memory:
        return cls(b.limits, b.options(SglangOptions), cls.copies(b), b.block_bytes)

    def __init__(
        self,
        limits: Limits,
        options: SglangOptions,
        copies: Copies,
        page_bytes: float,
    ) -> None:
        """`page_bytes`: on all GPUs together."""
        super().__init__(limits, options, copies)
        self._options, self._drive = options, options.drive(page_bytes)
        num_pages = options.num_stored_pages(page_bytes)
        self._store = Storage(num_pages, BlockChain(self.block_size))
        self.storage_tier = TierCounters(num_blocks=num_pages or 0)
        self._least_tokens = max(options.hicache_storage_prefetch_threshold, self.block_size)
        self._most_occupied = int(OCCUPIED_SHARE * self.tree.host_unused * self.block_size)
        self._occupied = 0
        # Pages that are asked for.
        self._asking, self._reading, self._writing = self._workers = Worker(), Worker(), Worker()
        self._entered: list[Sequence] = []
        self.entered = self._entered
        self._askers: dict[Sequence, Asker] = {}
        self._num_passes = self._num_retrying = 0
        self._now_s = 0.0
        self._num_storing = 0
        self._answered: list[Prefetch] = []
        self._read: list[tuple[Prefetch, int | None]] = []
        """How many pages of each have come; None: no more will."""
        self._stored: list[tuple[Node, Pin]] = []
        self._to_release = 0
        self.tree.when_written = self._write

    def share(self, first: "StoredTreeMemory", place: int) -> None:
        """Before any request: the storage of another engine is this one's, too, the `place`-th that shares it."""
        self._store, self.block_keys = first._store, first.block_keys
        self._next_private_key -= place * PRIVATE_KEYS

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        scheduler.counters.tiers["disk"] = self.storage_tier

    # -- time ----------------------------------------------------------------------------------------------------------

    def wakes_s(self) -> float:
        return min(min(worker.next_s for worker in self._workers), self._next_deadline_s())

    def _next_deadline_s(self) -> float:
        now_s, found = self._now_s + TIE_S, inf
        for asker in self._askers.values():
            if asker.prefetch is not None and now_s < asker.deadline_s < found:
                found = asker.deadline_s
        return found

    @property
    def is_copying(self) -> bool:
        return self.tree.is_copying or self._num_storing > 0 or any(one.prefetch for one in self._askers.values())

    @property
    def counts_passes(self) -> bool:
        # What it is known that storage has is answered at once, and heard in the next pass.
        return self._num_retrying > 0 or bool(self._answered)

    def begin_step(self, now_s: float) -> None:
        self._now_s = now_s
        while (worker := min(self._workers, key=lambda worker: worker.next_s)).next_s <= now_s + TIE_S:
            worker.go_on()
        self.ask_for_entered()
        answered, self._answered = self._answered, []
        read, self._read = self._read, []
        stored, self._stored = self._stored, []
        to_release, self._to_release = self._to_release, 0
        super().begin_step(now_s)
        for prefetch in answered:
            self._take_room(prefetch)
        for prefetch, completed in read:
            self._note_read(prefetch, completed)
        for node, pin in stored:
            self.tree.unpin(node, pin)
        self._num_storing -= len(stored)
        self.tree.host_unused += to_release
        self._ask_again()

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask_for_entered(self) -> None:
        """Of each request that has entered the queue: ask storage for what follows on its longest cached prefix."""
        entered = self._entered[:]
        self._entered.clear()
        for seq in entered:
            self._askers[seq] = Asker()
            self._ask(seq)

    def _ask(self, seq: Sequence, stored_end: int | None = None) -> None:
        self.look_up(seq)
        asker, held = self._askers[seq], self.held(seq)
        match, size = held.match, self.block_size
        asker.matched = start = match.pages + match.host_pages
        anchor, root = match.best, self.tree.root
        if anchor is not root and not anchor.on_host:
            return
        self._stop_retrying(asker)
        end = min((seq.num_tokens - 1) // size, len(held.keys))
        is_known = stored_end is not None and start < stored_end <= end
        if is_known and stored_end is not None:
            end = stored_end
        if asker.is_late or asker.prefetch is not None or (end - start) * size < self._least_tokens:
            return
        if self._occupied * size >= self._most_occupied:
            self._retry(asker, stored_end)
            return
        stored = self._store.chain.named((), held.keys[:end])[start:]
        asker.prefetch = prefetch = Prefetch(seq, anchor, start, held.keys[start:end], stored)
        if anchor is not root:
            prefetch.pin = self.tree.pin(anchor)
        self._occupied += end - start
        self._asking.put(self._query(prefetch, is_known=is_known), self._now_s)

    def _query(self, prefetch: Prefetch, *, is_known: bool) -> Job:
        if is_known:
            prefetch.hit = len(prefetch.keys)
        else:
            yield self._drive.read_s(0)
            if not prefetch.is_terminated:
                prefetch.hit = self._num_stored(prefetch.stored)
        self._answered.append(prefetch)

    def _num_stored(self, keys: tuple[int, ...]) -> int:
        """How many of them, from the first on, are in storage."""
        return next((place for place, key in enumerate(keys) if key not in self._store), len(keys))

    def _retry(self, asker: Asker, stored_end: int | None = None) -> None:
        self._stop_retrying(asker)
        asker.retries, asker.stored_end = True, stored_end
        self._num_retrying += 1

    def _stop_retrying(self, asker: Asker) -> None:
        self._num_retrying -= asker.retries
        asker.retries, asker.due = False, None

    def _ask_again(self) -> None:
        """Those that asked in vain, when it is their turn; never the head of the queue, which waits for nothing."""
        self._num_passes += 1
        queue = self.scheduler.order
        if not self._num_retrying or not len(queue):
            return
        interval = self._options.hicache_storage_prefetch_retry_poll_interval
        head = queue.head()
        ready: list[Sequence] = []
        for seq in queue:
            asker = self._askers[seq]
            if not asker.retries:
                continue
            if seq is head or asker.attempts >= self._most_attempts or interval <= 0:
                self._stop_retrying(asker)
                continue
            asker.due = asker.due or self._num_passes + interval
            if asker.due <= self._num_passes:
                ready.append(seq)
        for seq in ready:
            asker = self._askers[seq]
            self._stop_retrying(asker)
            asker.attempts += 1
            self._ask(seq, asker.stored_end)

    @property
    def _most_attempts(self) -> int:
        return self._options.hicache_storage_prefetch_retry_max_attempts

    # -- reading -------------------------------------------------------------------------------------------------------

    def _take_room(self, prefetch: Prefetch) -> None:
        """Storage has answered: room on the host for what it has, and a place in the queue of reads."""
        asker, tree = self._askers.get(prefetch.seq), self.tree
        if asker is None or asker.prefetch is not prefetch:
            return
        hit, size = prefetch.hit, self.block_size
        if hit * size < self._least_tokens:
            self._retry(asker)
            self._give_up(asker)
            return
        if tree.host_unused < hit:
            tree.evict_host(hit)
        taken = min(hit, tree.host_unused)
        if taken < hit and taken * size < self._least_tokens:
            self._give_up(asker)
            self._retry(asker, prefetch.start + hit)
            return
        prefetch.hit = prefetch.taken = taken
        tree.host_unused -= taken
        self._reading.put(self._transfer(prefetch, taken), self._now_s)

    def _transfer(self, prefetch: Prefetch, pages: int) -> Job:
        for begin in range(0, pages, BATCH_PAGES):
            if prefetch.is_terminated:
                break
            batch = prefetch.stored[begin : min(begin + BATCH_PAGES, pages)]
            yield self._drive.read_s(len(batch))
            found = self._num_stored(batch)
            self._store.read(batch[:found])
            self._read.append((prefetch, begin + found))
            if found < len(batch):
                break
        self._read.append((prefetch, None))

    def _note_read(self, prefetch: Prefetch, completed: int | None) -> None:
        asker = self._askers.get(prefetch.seq)
        is_current = asker is not None and asker.prefetch is prefetch
        if completed is not None:
            if is_current:
                prefetch.completed = completed
            return
        if asker is not None and is_current:
            self._finish(asker, prefetch)
        self._to_release += (prefetch.taken or 0) - prefetch.completed

    def _finish(self, asker: Asker, prefetch: Prefetch) -> None:
        """What has come is the tree's."""
        tree, completed = self.tree, prefetch.completed
        present = tree.insert_on_host(prefetch.anchor, prefetch.keys[:completed])
        if present is None:
            self._to_release += completed
        else:
            tree.host_unused += present
            self.storage_tier.num_loads += 1
            self.storage_tier.hit_tokens += (completed - present) * self.block_size
        self._give_up(asker)

    def _give_up(self, asker: Asker) -> None:
        prefetch, asker.prefetch = asker.prefetch, None
        assert prefetch is not None, "something was asked for"
        if prefetch.pin is not None:
            self.tree.unpin(prefetch.anchor, prefetch.pin)
        self._occupied -= len(prefetch.keys)

    # -- admitting -----------------------------------------------------------------------------------------------------

    def look_up_next(self, seq: Sequence) -> bool:
        if not self._end_prefetch(seq):
            return False
        self.look_up(seq)
        return not self._ask_for_lost(seq)

    def _end_prefetch(self, seq: Sequence) -> bool:
        """Take what has come of its prefetch, unless it is to wait for more; whether none is under way any more."""
        asker = self._askers[seq]
        prefetch = asker.prefetch
        if prefetch is None:
            return True
        policy = self._options.hicache_storage_prefetch_policy
        if policy == "wait_complete":
            return False
        if policy == "timeout":
            if asker.deadline_s == inf:
                # Looked at for the first time.
                asker.deadline_s = self._deadline_s(prefetch)
                return False
            if prefetch.taken is not None and prefetch.completed >= prefetch.hit:
                return False
            if self._now_s + TIE_S < asker.deadline_s:
                return False
            asker.is_late = True
            self._stop_retrying(asker)
        prefetch.is_terminated = True
        if prefetch.taken is not None:
            self._finish(asker, prefetch)
        else:
            if not asker.is_late:
                self._retry(asker)
            self._give_up(asker)
        return True

    def _deadline_s(self, prefetch: Prefetch) -> float:
        """Until when a request waits that is looked at now."""
        options, tokens = self._options, len(prefetch.keys) * self.block_size
        wait_s = tokens / 1024 * options.hicache_storage_prefetch_timeout_per_ki_token
        return self._now_s + options.hicache_storage_prefetch_timeout_base + wait_s

    def _ask_for_lost(self, seq: Sequence) -> bool:
        """Ask storage anew where hits were lost since it was asked; whether it was."""
        asker, match = self._askers[seq], self.held(seq).match
        matched = match.pages + match.host_pages
        if matched >= asker.matched:
            return False
        if asker.attempts >= self._most_attempts:
            asker.matched = matched
            return False
        asker.attempts += 1
        self._ask(seq)
        if self.wakes_s() == inf and not self.tree.is_copying:
            # An idle engine looks again when something happens next: nothing will.
            self.scheduler.changed = True
        return True

    def hold(self, seq: Sequence) -> int:
        self._forget_asker(seq)
        return super().hold(seq)

    def forget(self, seq: Sequence) -> None:
        self._forget_asker(seq)
        super().forget(seq)

    def _forget_asker(self, seq: Sequence) -> None:
        asker = self._askers.pop(seq, None)
        if asker is None:
            return
        self._stop_retrying(asker)
        if (prefetch := asker.prefetch) is not None:
            # Its client has left.
            prefetch.is_terminated = True
            if prefetch.taken is not None:
                self._to_release += prefetch.completed
            self._give_up(asker)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, node: Node) -> None:
        """`node` has been copied to the host: it stays there until storage has it, too."""
        self._num_storing += 1
        path = self.tree.keys_of(node)
        keys = self._store.chain.named((), path)[len(path) - len(node.keys) :]
        self._writing.put(self._save(node, self.tree.pin(node), keys), self._now_s)

    def _save(self, node: Node, pin: Pin, keys: tuple[int, ...]) -> Job:
        tier = self.storage_tier
        for begin in range(0, len(keys), BATCH_PAGES):
            batch = keys[begin : begin + BATCH_PAGES]
            new = [key for key in batch if key not in self._store]
            yield self._drive.write_s(len(new))
            tier.stored_blocks += len(new)
            tier.evicted_blocks += self._store.write(batch)
        self._stored.append((node, pin))


def share_storage(memories: Iterable[Memory]) -> None:
    """Of engines that have not begun: the storage of the first is that of all."""
    found = [memory for memory in memories if isinstance(memory, StoredTreeMemory)]
    for place, memory in enumerate(found[1:], 1):
        memory.share(found[0], place)
