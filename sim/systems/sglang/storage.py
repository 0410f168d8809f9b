"""`HostStorage`: HiCache's storage (L3) behind the host of SGLang's tree.

What has been copied to the host is written to storage. A request that enters the queue asks it for what follows on its
longest cached prefix; what is there is read to the host, and loaded from there when the request is admitted. How long
an admission waits for that is `hicache_storage_prefetch_policy`. Asking, reading and writing are threads of SGLang's
controller; each does one thing after another, in batches that take a latency and their bytes' time.

Where layers have a pool of their own (`MarkedTree`), a hit takes the marks of its last pages from storage, too: all of
it comes, or nothing does.
Source: sglang 0.5.23, `managers/cache_controller.py`, `mem_cache/unified_radix_cache.py`, `storage_prefetch.py`;
times as its own storage backend `sim` has them.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from math import inf

from sim.engine.limits import TierCounters
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.kv.index.block_chain import BlockChain
from sim.kv.memory import Memory
from sim.kv.tiers.storage import Storage
from sim.systems.sglang.memory import TreeMemory
from sim.systems.sglang.options import SglangOptions
from sim.systems.sglang.tree import Node, Pin

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
    `completed` have come. `marks`: of its last so many pages the marks are asked for, with room for `marks_taken`;
    `marks_read` have come (None: not yet).
    """

    def __init__(self, seq: Sequence, anchor: Node, start: int, keys: tuple[int, ...], stored: tuple[int, ...]) -> None:
        self.seq, self.anchor, self.start, self.keys, self.stored = seq, anchor, start, keys, stored
        self.pin: Pin | None = None
        self.hit = self.completed = 0
        self.taken: int | None = None
        self.marks = self.marks_taken = 0
        self.marks_read: int | None = None
        self.is_terminated = False


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


class HostStorage:
    """What the three threads do for a tree."""

    def __init__(self, memory: "TreeMemory", options: SglangOptions, page_bytes: float, mark_bytes: float) -> None:
        """`page_bytes`, `mark_bytes`: on all GPUs together."""
        self._memory, self.tree, self._size = memory, memory.tree, memory.block_size
        self._options, self._drive, self._mark_drive = options, options.drive(page_bytes), options.drive(mark_bytes)
        num_pages = options.num_stored_pages(page_bytes)
        if num_pages is not None and self.tree.has_marks:
            raise UserError(
                "sglang hicache-storage-space: of layers with a pool of their own storage keeps all that is written; "
                "leave it out"
            )
        chain = BlockChain(self._size)
        self._store, self._marks = Storage(num_pages, chain), Storage(None, chain)
        self.counters = TierCounters(num_blocks=num_pages or 0)
        self._least_tokens = max(options.hicache_storage_prefetch_threshold, self._size)
        self._most_occupied = int(OCCUPIED_SHARE * self.tree.host_unused * self._size)
        self._occupied = 0
        # Pages that are asked for.
        self._asking, self._reading, self._writing = self._workers = Worker(), Worker(), Worker()
        self.entered: list[Sequence] = []
        self._askers: dict[Sequence, Asker] = {}
        self._num_passes = self._num_retrying = 0
        self._now_s = 0.0
        self._num_storing = 0
        self._answered: list[Prefetch] = []
        self._read: list[tuple[Prefetch, int | None, int | None]] = []
        """Of each how many pages have come, or marks; None of both: no more will."""
        self._stored: list[tuple[Node, Pin]] = []
        self._to_release = self._marks_to_release = 0
        self.tree.when_written = self._write

    def share(self, first: "HostStorage", place: int) -> None:
        """Before any request: the storage of another engine is this one's, too, the `place`-th that shares it."""
        self._store, self._marks = first._store, first._marks
        self._memory.share_keys(first._memory, place * PRIVATE_KEYS)

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
        return self._num_storing > 0 or any(one.prefetch for one in self._askers.values())

    @property
    def counts_passes(self) -> bool:
        # What it is known that storage has is answered at once, and heard in the next pass.
        return self._num_retrying > 0 or bool(self._answered)

    def begin_step(self, now_s: float) -> Callable[[], None]:
        """What has happened by now; returns what is to be done about it once copies have been seen to."""
        self._now_s = now_s
        while (worker := min(self._workers, key=lambda worker: worker.next_s)).next_s <= now_s + TIE_S:
            worker.go_on()
        self.ask_for_entered()
        answered, self._answered = self._answered, []
        read, self._read = self._read, []
        stored, self._stored = self._stored, []
        to_release, self._to_release = self._to_release, 0
        marks_to_release, self._marks_to_release = self._marks_to_release, 0

        def drain() -> None:
            for prefetch in answered:
                self._take_room(prefetch)
            for prefetch, completed, marks in read:
                self._note_read(prefetch, completed, marks)
            for node, pin in stored:
                self.tree.unpin(node, pin)
            self._num_storing -= len(stored)
            self.tree.host_unused += to_release
            self.tree.host_marks_unused += marks_to_release
            self._ask_again()

        return drain

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask_for_entered(self) -> None:
        """Of each request that has entered the queue: ask storage for what follows on its longest cached prefix."""
        entered = self.entered[:]
        self.entered.clear()
        for seq in entered:
            self._askers[seq] = Asker()
            self._ask(seq)

    def _ask(self, seq: Sequence, stored_end: int | None = None) -> None:
        self._memory.look_up(seq)
        asker, held = self._askers[seq], self._memory.held(seq)
        match, size = held.match, self._size
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
        prefetch.marks = self.tree.marks_to_fetch(anchor, end - start)
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
                prefetch.hit = self._num_hit(prefetch)
        self._answered.append(prefetch)

    def _num_hit(self, prefetch: Prefetch) -> int:
        """How many of its pages storage has, of which it has the last marks, too."""
        hit, keys, wanted = self._num_stored(prefetch.stored, self._store), prefetch.stored, prefetch.marks
        while wanted and hit and not all(key in self._marks for key in keys[max(0, hit - wanted) : hit]):
            hit -= 1
        return hit

    def _num_stored(self, keys: tuple[int, ...], store: Storage) -> int:
        """How many of them, from the first on, are in storage: pages or marks."""
        return next((place for place, key in enumerate(keys) if key not in store), len(keys))

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
        queue = self._memory.scheduler.order
        if not self._num_retrying or not len(queue.waiting):
            return
        interval = self._options.hicache_storage_prefetch_retry_poll_interval
        head = queue.head()
        ready: list[Sequence] = []
        for seq in queue:
            asker = self._askers.get(seq)
            # Some have arrived and not been looked at.
            if asker is None or not asker.retries:
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
        hit, size = prefetch.hit, self._size
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
        marks = min(prefetch.marks, hit)
        tree.host_unused -= taken
        if not tree.take_host_marks(marks):
            self._to_release += taken
            self._give_up(asker)
            self._retry(asker, prefetch.start + hit)
            return
        prefetch.marks_taken, prefetch.hit, prefetch.taken = marks, taken, taken
        self._reading.put(self._transfer(prefetch, taken), self._now_s)

    def _transfer(self, prefetch: Prefetch, pages: int) -> Job:
        for begin in range(0, pages, BATCH_PAGES):
            if prefetch.is_terminated:
                break
            batch = prefetch.stored[begin : min(begin + BATCH_PAGES, pages)]
            yield self._drive.read_s(len(batch))
            found = self._num_stored(batch, self._store)
            self._store.read(batch[:found])
            self._read.append((prefetch, begin + found, None))
            if found < len(batch):
                break
        else:
            if prefetch.marks_taken and not prefetch.is_terminated:
                keys = prefetch.stored[max(0, pages - prefetch.marks) : pages]
                self._marks_to_release += prefetch.marks_taken - len(keys)
                prefetch.marks_taken = len(keys)
                yield self._mark_drive.read_s(len(keys))
                found = self._num_stored(keys, self._marks)
                self._read.append((prefetch, None, found))
        self._read.append((prefetch, None, None))

    def _note_read(self, prefetch: Prefetch, completed: int | None, marks: int | None) -> None:
        asker = self._askers.get(prefetch.seq)
        is_current = asker is not None and asker.prefetch is prefetch
        if completed is not None or marks is not None:
            if is_current:
                prefetch.completed = prefetch.completed if completed is None else completed
                prefetch.marks_read = marks
            return
        if asker is not None and is_current:
            self._finish(asker, prefetch)
        self._to_release += (prefetch.taken or 0) - prefetch.completed
        if prefetch.marks_read is None:
            self._marks_to_release += prefetch.marks_taken

    def _finish(self, asker: Asker, prefetch: Prefetch) -> None:
        """What has come is the tree's; where marks belong to it, all of it or nothing."""
        tree, completed = self.tree, prefetch.completed
        is_whole = completed == prefetch.hit and prefetch.marks_read == prefetch.marks_taken
        inserted = None
        if is_whole or not prefetch.marks:
            inserted = tree.insert_on_host(prefetch.anchor, prefetch.keys[:completed])
        if inserted is None:
            self._release(prefetch)
        else:
            node, present = inserted
            tree.host_unused += present
            unused = prefetch.marks_taken
            if node is not None:
                unused -= tree.mark_on_host(prefetch.anchor, node, prefetch.marks_taken)
            self._marks_to_release += unused
            self.counters.num_loads += 1
            self.counters.hit_tokens += (completed - present) * self._size
        self._give_up(asker)

    def _release(self, prefetch: Prefetch) -> None:
        """What has come of it is of no use."""
        self._to_release += prefetch.completed
        if prefetch.marks_read is not None:
            self._marks_to_release += prefetch.marks_taken

    def _give_up(self, asker: Asker) -> None:
        prefetch, asker.prefetch = asker.prefetch, None
        assert prefetch is not None, "something was asked for"
        if prefetch.pin is not None:
            self.tree.unpin(prefetch.anchor, prefetch.pin)
        self._occupied -= len(prefetch.keys)

    # -- admitting -----------------------------------------------------------------------------------------------------

    def end_prefetch(self, seq: Sequence) -> bool:
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
        options, tokens = self._options, len(prefetch.keys) * self._size
        wait_s = tokens / 1024 * options.hicache_storage_prefetch_timeout_per_ki_token
        return self._now_s + options.hicache_storage_prefetch_timeout_base + wait_s

    def ask_for_lost(self, seq: Sequence) -> bool:
        """Ask storage anew where hits were lost since it was asked; whether it was."""
        asker, match = self._askers[seq], self._memory.held(seq).match
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
            self._memory.scheduler.changed = True
        return True

    def forget(self, seq: Sequence) -> None:
        asker = self._askers.pop(seq, None)
        if asker is None:
            if seq in self.entered:
                # A full queue refused it at once.
                self.entered.remove(seq)
            return
        self._stop_retrying(asker)
        if (prefetch := asker.prefetch) is not None:
            # Its client has left.
            prefetch.is_terminated = True
            if prefetch.taken is not None:
                self._release(prefetch)
            self._give_up(asker)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, node: Node) -> None:
        """`node` has been copied to the host: it stays there until storage has it, too."""
        if not node.on_host:
            return
        self._num_storing += 1
        path = self.tree.keys_of(node)
        keys = self._store.chain.named((), path)[len(path) - len(node.keys) :]
        marks = keys[len(keys) - self.tree.num_host_marks(node) :]
        self._writing.put(self._save(node, self.tree.pin(node), keys, marks), self._now_s)

    def _save(self, node: Node, pin: Pin, keys: tuple[int, ...], marks: tuple[int, ...]) -> Job:
        tier = self.counters
        if marks:
            yield self._mark_drive.write_s(sum(key not in self._marks for key in marks))
            self._marks.write(marks)
        for begin in range(0, len(keys), BATCH_PAGES):
            batch = keys[begin : begin + BATCH_PAGES]
            new = [key for key in batch if key not in self._store]
            yield self._drive.write_s(len(new))
            tier.stored_blocks += len(new)
            tier.evicted_blocks += self._store.write(batch)
        self._stored.append((node, pin))


def share_storage(memories: Iterable[Memory]) -> None:
    """Of engines that have not begun: the storage of the first is that of all."""
    found = [one.storage for one in memories if isinstance(one, TreeMemory) and one.storage is not None]
    for place, storage in enumerate(found[1:], 1):
        storage.share(found[0], place)
