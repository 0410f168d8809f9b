"""Runs the SGLang oracle with copies between GPU and host that take time, over its virtual clock.

SGLang's cache, controller and acknowledgements stay its own. Replaced is what moves bytes (`L2TransferEngine`): a copy
takes so long a token, on a lane each way. It waits for the batches launched before it (SGLang's fence). A batch
waits for what it loads layer by layer. Where SGLang waits for a copy (written back), so does its clock.

Storage (L3) is SGLang's own backend `sim`, which keeps keys alone. Its controller's three threads are run here, batch
by batch, over the virtual clock; what they are asked, and what becomes of their answers, is SGLang's.
"""

from collections import deque
from collections.abc import Generator
from importlib import import_module
from math import inf
from typing import Any, NamedTuple

LAYERS = 4
"""Of the model that is priced; as `kvtwin.testing.engines.linear_machine` has."""
LOOP = "sch.metrics_reporter.start_scheduler_time_accounting()"
"""The oracle's last line before SGLang's loop begins."""


class Copies:
    """The two lanes; `names` are the oracle's own variables."""

    def __init__(self, names: dict[str, Any], settings: dict[str, float]) -> None:
        self.names, self.copy_s = names, settings["copy_s"]
        self.free_s = {"out": 0.0, "in": 0.0}
        self.load: tuple[float, float, float] | None = None
        scheduler = names["sch"]
        self.controller = scheduler.tree_cache.cache_controller
        engine = self.controller.l2_transfer_engine
        engine.submit_device_to_host = lambda transfers: self.copied(transfers, "out")[0]
        engine.submit_host_to_device = self.loaded
        self.forward, self.idle = scheduler.tp_worker.forward_batch_generation, scheduler.on_idle
        scheduler.tp_worker.forward_batch_generation = self.computed
        scheduler.on_idle = self.idled
        self.abort, self.has_aborted = scheduler.send_abort_output, False
        scheduler.send_abort_output = self.aborted
        self.threads = Threads(names, settings) if "storage_latency_s" in settings else None

    def copied(self, transfers: list, way: str) -> tuple["Completion", float, float]:
        """A copy begins; what SGLang asks about it, when it begins, and for how long."""
        begin_s = max(self.names["t"], self.names["device_free"], self.free_s[way])
        seconds = sum(len(transfer.device_indices) for transfer in transfers) * self.copy_s
        self.free_s[way] = begin_s + seconds
        event = Ended(self.names, begin_s + seconds)
        return Completion(event, event, False), begin_s, seconds

    def loaded(self, transfers: list, **others: object) -> "Completion":
        completion, begin_s, seconds = self.copied(transfers, "in")
        self.load = begin_s, seconds, self.names["device_free"]
        return completion

    def computed(self, batch: Any, *args: Any, **others: Any) -> Any:
        """A batch, which the oracle has priced as if nothing were loaded."""
        if self.load is not None:
            (begin_s, seconds, free_s), self.load = self.load, None
            done_s = max(self.names["t"], free_s)
            layer_s = (self.names["device_free"] - done_s) / LAYERS
            for layer in range(LAYERS):
                done_s = max(done_s, begin_s + seconds * (layer + 1) / LAYERS) + layer_s
            self.names["device_free"] = done_s
        return self.forward(batch, *args, **others)

    def aborted(self, *args: Any, **others: Any) -> None:
        """A request is given up, and its pages are free."""
        self.has_aborted = True
        self.abort(*args, **others)

    def idled(self) -> None:
        """With nothing to compute, the next thing to happen is a copy's end or an arrival."""
        self.idle()
        if self.has_aborted:
            # SGLang looks again at once.
            self.has_aborted = False
            return
        acks = [*self.controller.ack_write_queue[:1], *self.controller.ack_load_queue[:1]]
        ends = [ack.finish_event.end_s for ack in acks]
        ends += self.threads.next_times() if self.threads else []
        if ends:
            trace, place = self.names["trace"], self.names["nxt"]
            ends += [trace[place][0]] if place < len(trace) else []
            self.names["t"] = max(self.names["t"], min(ends))
            # Its clock stands still no longer.
            self.names["idle"] = 0


class Completion(NamedTuple):
    """As SGLang's `TransferCompletion`."""

    start_event: "Ended"
    finish_event: "Ended"
    timing_enabled: bool


class Ended:
    """An event that happens at `end_s`."""

    def __init__(self, names: dict[str, Any], end_s: float) -> None:
        self.names, self.end_s = names, end_s

    def query(self) -> bool:
        return self.end_s <= self.names["t"] + 1e-12

    def synchronize(self) -> None:
        self.names["t"] = max(self.names["t"], self.end_s)


class Threads:
    """Those of the controller that ask storage, read from it and write to it."""

    def __init__(self, names: dict[str, Any], settings: dict[str, float]) -> None:
        timers = import_module("sglang.srt.utils.poll_timer")
        sglang = import_module("sglang.srt.managers.cache_controller")
        self.count = import_module("sglang.srt.mem_cache.hicache_storage").count_pool_hits
        self.batch_pages, self.Ack = sglang.STORAGE_BATCH_SIZE, sglang.PrefetchAck
        self.names = names
        self.latency_s, self.read_s, self.write_s = (
            settings[f"storage_{name}_s"] for name in ("latency", "read", "write")
        )
        self.tree = names["sch"].tree_cache
        self.controller = controller = self.tree.cache_controller
        controller._stop_storage_threads()
        self.page, self.keys = controller.page_size, controller.storage_backend._keys
        # When what each thread does ends, what that is, and what it has yet to do.
        self.ends_s: dict[str, float] = {"ask": inf, "read": inf, "write": inf}
        self.doing: dict[str, Generator[float, None, None]] = {}
        self.waiting: dict[str, deque] = {thread: deque() for thread in self.ends_s}
        controller.prefetch_queue = Inbox(self, "ask", self.ask)
        controller.prefetch_buffer = Inbox(self, "read", self.read)
        controller.backup_queue = Inbox(self, "write", self.write)
        for name in ("prefetch_hit_queue", "ack_prefetch_queue", "ack_backup_queue"):
            setattr(controller, name, Outbox(self))
        vars(timers)["time"] = Clock(names)
        timers.PollTimer.elapsed = lambda timer: names["t"] - timer.started_at + 1e-9 if timer.running else 0.0

    def next_times(self) -> list[float]:
        ends = [end_s for end_s in self.ends_s.values() if end_s < inf]
        for handle, wait in self.tree._storage_prefetch_wait.items():
            if handle in self.tree.ongoing_prefetch and not wait.expired and wait.timer.running:
                ends.append(wait.timer.started_at + wait.timeout_s)
        return [end_s for end_s in ends if end_s > self.names["t"] + 1e-9]

    def advance(self) -> None:
        while True:
            thread = min(self.ends_s, key=self.ends_s.__getitem__)
            if self.ends_s[thread] > self.names["t"] + 1e-9:
                return
            seconds = next(self.doing[thread], None)
            if seconds is None:
                self.begin(thread, self.ends_s[thread])
            else:
                self.ends_s[thread] += seconds

    def put(self, thread: str, job: Generator[float, None, None]) -> None:
        self.waiting[thread].append((self.names["t"], job))
        if self.ends_s[thread] == inf:
            self.begin(thread, self.names["t"])

    def begin(self, thread: str, at_s: float) -> None:
        self.ends_s[thread] = inf
        while self.waiting[thread]:
            put_s, job = self.waiting[thread].popleft()
            seconds = next(job, None)
            if seconds is not None:
                self.doing[thread], self.ends_s[thread] = job, max(at_s, put_s) + seconds
                return

    def ask(self, operation: Any) -> Generator[float, None, None]:
        if not operation.assume_stored:
            yield self.latency_s
        hashes, tokens = [], 0
        if not operation.is_terminated():
            hashes, tokens = self.controller._storage_hit_query(operation)
        operation.hash_value, operation.storage_hit_count = hashes[: tokens // self.page], tokens
        self.controller.prefetch_hit_queue.put(operation)

    def read(self, operation: Any) -> Generator[float, None, None]:
        hashes, found, acks = operation.hash_value, 0, self.controller.ack_prefetch_queue
        for begin in range(0, len(hashes), self.batch_pages):
            if operation.is_terminated():
                break
            batch = hashes[begin : begin + self.batch_pages]
            yield self.latency_s + len(batch) * self.page * self.read_s
            found += len(batch)
            acks.put(self.Ack(operation.request_id, operation, completed_tokens=found * self.page))
        if marks := operation.pool_transfers:
            hits = {}
            if found == len(hashes) and not operation.is_terminated():
                self.controller._sync_trailing_keys(marks, hashes, found)
                yield self.latency_s + sum(len(mark.host_indices) for mark in marks) * self.read_s
                hits = self.count({mark.name: [key in self.keys for key in self.scoped(mark)] for mark in marks})
            acks.put(self.Ack(operation.request_id, operation, pool_hits=hits))
        acks.put(self.Ack(operation.request_id, operation, completed_req=True))

    def scoped(self, marks: Any) -> list[str]:
        """Keys in storage of what a pool of its own has of some pages."""
        return [self.controller.storage_backend._scoped(marks.name, key) for key in marks.keys]

    def write(self, operation: Any) -> Generator[float, None, None]:
        hashes = operation.hash_value
        if marks := operation.pool_transfers:
            tokens = 0.0
            for mark in marks:
                new = sum(key not in self.keys for key in self.scoped(mark))
                tokens += len(mark.host_indices) * new / len(mark.keys)
            yield self.latency_s + tokens * self.write_s
            self.keys.update(key for mark in marks for key in self.scoped(mark))
        for begin in range(0, len(hashes), self.batch_pages):
            batch = hashes[begin : begin + self.batch_pages]
            yield self.latency_s + sum(key not in self.keys for key in batch) * self.page * self.write_s
            self.keys.update(batch)
        self.controller.ack_backup_queue.put(operation)


class Inbox:
    """What a thread is to do."""

    def __init__(self, threads: Threads, thread: str, job: Any) -> None:
        self.threads, self.thread, self.job = threads, thread, job

    def put(self, operation: Any) -> None:
        self.threads.advance()
        self.threads.put(self.thread, self.job(operation))


class Outbox:
    """What threads have done by now."""

    def __init__(self, threads: Threads) -> None:
        self.threads, self.items = threads, deque()

    def qsize(self) -> int:
        self.threads.advance()
        return len(self.items)

    def put(self, item: Any) -> None:
        self.items.append(item)

    def get(self) -> Any:
        return self.items.popleft()


class Clock:
    """What SGLang takes for the module `time`."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def perf_counter(self) -> float:
        return self.names["t"]


def timed(text: str, names: dict[str, Any], settings: dict[str, float]) -> str:
    """The oracle's script `text`, which is run among `names`, with copies that take time."""
    assert text.count(LOOP) == 1, "another oracle"
    names["copies_take_time"] = lambda: Copies(names, settings)
    return text.replace(LOOP, f"copies_take_time(); {LOOP}")
