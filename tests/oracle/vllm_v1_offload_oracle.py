"""Ask vLLM 0.33.0's own v1 scheduler what it decides with its OffloadingConnector; as ``vllm_v1_oracle.py``.

The connector's scheduler side is vLLM's; ours is a worker that only pretends, by the rules of vLLM's (``offloading/
worker.py``, ``cpu/gpu_worker.py``). A step at time t: stores that the step before decided start, and those of its own
that are to be flushed; the step waits for what is to be flushed; transfers that have ended by then are reported with
its output; the computation runs; loads start when it ends. Each direction is a lane of its own, first come, first
served, `load_s_per_block` and `store_s_per_block` a block. A step without tokens takes no time.

With async scheduling the same happens when a step is launched, as ``UniProcExecutor`` launches it: two steps are in
flight, those without tokens among them (``EngineCore.step_with_batch_queue``). Copies start when all that was launched
before them is computed; the host, not the device, waits for what is to be flushed; and what is reported with a step had
ended when it was launched, however late its output is looked at. A token comes when it is computed, though a host that
waits for a flush takes it later. The engine's pause of 1 ms after a step without tokens is left out.

vLLM hands those that ended in one step to the connector as a set, whose order depends on the process. Here they come in
the order in which they ran.

With `storage` vLLM's own ``TieringOffloadingManager`` stands behind the connector, with a tier of files that only
pretends. It answers look-ups between two steps, and a tier's jobs end in the order of their submission.

Besides what the other oracle answers: ``copies``, entries of how many ``steps`` were before it (its own counted), the
step's number, and what vLLM copies: ``load request:tokens``, ``store request:blocks``, ``flush jobs``; and ``loaded``
tokens by request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, RequestOffloadingContext, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm_v1_oracle import ARRIVAL_SLACK, BLOCK, Options, Oracle, Row, make_scheduler

BLOCK_BYTES = 4 * BLOCK
"""Of the one layer with one head of one element, keys and values of 2 bytes."""


@dataclass(frozen=True)
class OffloadOptions(Options):
    """With the connector's own, by their names in its configuration."""

    cpu_chunks: int = 100
    blocks_per_chunk: int = 1
    load_s_per_block: float = 1e-4
    store_s_per_block: float = 1e-4
    eviction_policy: str = "lru"
    store_threshold: int = 0
    offload_outputs: bool = False
    storage: bool = False
    """Files behind the host, with what a block takes from and to them."""
    storage_read_s_per_block: float = 1e-4
    storage_write_s_per_block: float = 1e-4


class HostMemory:
    """What vLLM maps: chunks of a byte, which are never read."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks

    def create_kv_memoryview(self) -> memoryview:
        """A row a chunk."""
        return memoryview(bytearray(self.num_chunks)).cast("B", shape=[self.num_chunks, 1])

    def cleanup(self) -> None:
        """Nothing is mapped."""


class InlineLookups(AsyncLookupManager):
    """vLLM's own, whose thread has answered before the next step."""

    def __init__(self, files: Files) -> None:
        self._files = files
        super().__init__("files")

    def _worker(self) -> None:
        """There is no thread."""

    def batch_lookup(self, keys: list[Any], req_context: Any) -> list[bool]:
        return [self._files.written_at.get(key, inf) <= self._files.oracle.now + ARRIVAL_SLACK for key in keys]

    def flush(self) -> None:
        super().flush()
        while not self._lookup_queue.empty():
            asked = self._lookup_queue.get()
            found = self.batch_lookup([key for key, *_ in asked], None)
            self._pending_results.put([(key, number, hit) for (key, _, number), hit in zip(asked, found, strict=True)])


class Files(SecondaryTierManager):
    """As vLLM's ``tiering/fs``: jobs in two lanes, first come, first served; chunks that are there cost nothing."""

    def __init__(self, oracle: OffloadOracle, view: memoryview) -> None:
        super().__init__(None, view, "files")
        self.oracle = oracle
        self.written_at: dict[Any, float] = {}
        self.jobs: list[tuple[float, int]] = []
        self.asked = False
        self._free_at = {"read": 0.0, "write": 0.0}
        self._lookups = InlineLookups(self)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            self.asked = True
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def _submit(self, job: Any, lane: str, num_chunks: int, s_per_block: float) -> float:
        end = (
            max(self.oracle.now, self._free_at[lane]) + num_chunks * self.oracle.options.blocks_per_chunk * s_per_block
        )
        if num_chunks:
            self._free_at[lane] = end
        else:
            end = self.oracle.now
        self.jobs.append((end, job.job_id))
        return end

    def submit_store(self, job_metadata: Any) -> None:
        new = [key for key in job_metadata.keys if self.written_at.get(key, inf) > self.oracle.now + ARRIVAL_SLACK]
        end = self._submit(job_metadata, "write", len(new), self.oracle.options.storage_write_s_per_block)
        for key in new:
            self.written_at[key] = min(end, self.written_at.get(key, inf))

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, "read", len(job_metadata.keys), self.oracle.options.storage_read_s_per_block)

    def get_finished_jobs(self) -> list[JobResult]:
        done = [job for job in self.jobs if job[0] <= self.oracle.now + ARRIVAL_SLACK]
        self.jobs = [job for job in self.jobs if job not in done]
        return [JobResult(number, success=True) for _, number in done]

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Nothing is reset."""


class OffloadOracle(Oracle):
    """The scheduler with the connector, and a worker."""

    options: OffloadOptions

    def __init__(self, rows: Sequence[Row], options: OffloadOptions) -> None:
        self.now = 0.0
        self.files: Files | None = None
        super().__init__(rows, options)
        self.copies: list[tuple[int, int, str]] = []
        self.loaded: dict[int, int] = {}
        self._loads: list[tuple[int, int]] = []
        self._unsubmitted: dict[int, Any] = {}
        self._flying: list[tuple[float, int, str, str]] = []
        self._free_at = {"load": 0.0, "store": 0.0}
        connector = self.scheduler.connector
        after_alloc = connector.update_state_after_alloc

        def counted(request: Any, blocks: Any, tokens: int) -> Any:
            if tokens:
                self._loads.append((int(request.request_id), tokens))
            return after_alloc(request, blocks, tokens)

        connector.update_state_after_alloc = counted

    def _make_scheduler(self) -> tuple[Any, Any]:
        options, align = self.options, SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
        chunk_bytes = -(-BLOCK_BYTES * options.blocks_per_chunk // align) * align
        extra = {
            "cpu_bytes_to_use": options.cpu_chunks * chunk_bytes,
            "blocks_per_chunk": options.blocks_per_chunk,
            "eviction_policy": options.eviction_policy,
            "store_threshold": options.store_threshold,
            "offload_prompt_only": not options.offload_outputs,
        }
        config = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
        scheduler, hasher = make_scheduler(options, config)
        connector = scheduler.connector.connector_scheduler
        assert connector.manager._num_chunks == options.cpu_chunks
        if options.storage:
            primary = CPUPrimaryTierOffloadingManager(
                options.cpu_chunks, HostMemory(options.cpu_chunks), options.eviction_policy
            )
            self.files = Files(self, primary.get_kv_memoryview())
            connector.manager = TieringOffloadingManager(primary, [self.files])
        return scheduler, hasher

    def run(self) -> dict[str, Any]:
        answer = super().run()
        return answer | {"copies": self.copies, "loaded": self.loaded}

    def run_sync(self) -> float:
        now = 0.0
        ended: list[str] = []
        while True:
            self._arrive(now)
            if not self.scheduler.has_requests():
                if self.next >= len(self.rows):
                    return now
                now = max(now, self.rows[self.next].arrival_s)
                continue
            output, price, meta = self._step(now, ended)
            start = self._begin(meta, now, now)
            busy = bool(output.num_scheduled_tokens)
            if not busy:
                self._submit_all("load", meta.load_jobs, start)
            reported = self._poll(start)
            now = start + price
            if busy:
                self._submit_all("load", meta.load_jobs, now)
            self._unsubmitted.update(meta.store_jobs)
            sampling = {}
            for key in output.num_scheduled_tokens:
                request = self.scheduler.requests[key]
                sampling[key] = None if request.is_prefill_chunk else request.num_output_tokens
            ended = self._deliver(output, sampling, now, reported)
            if not (busy or reported or self._unsubmitted or self._victims or ended or self._asked()):
                if later := self._next_facts():
                    now = max(now, min(later))
                elif self.scheduler.has_unfinished_requests():
                    raise RuntimeError("requests wait for ever")

    def run_queued(self) -> float:
        now = free_at = 0.0
        flying: deque[tuple[float, Any, dict[str, int | None], Any]] = deque()
        sampled: dict[str, int] = {}
        ended: list[str] = []
        silent = 0
        while True:
            self._arrive(now)
            if self.scheduler.has_requests():
                output, price, meta = self._step(now, ended)
                busy = bool(output.num_scheduled_tokens)
                told = bool(self._unsubmitted or meta.load_jobs or meta.store_jobs or meta.jobs_to_flush or ended)
                told |= self._asked()
                ended = []
                now = self._begin(meta, now, max(now, free_at))
                free_at = max(now, free_at) + price
                self._submit_all("load", meta.load_jobs, free_at)
                reported = self._poll(now)
                self._unsubmitted.update(meta.store_jobs)
                sampling: dict[str, int | None] = {}
                for key in output.num_scheduled_tokens:
                    sampling[key] = None
                    if not self.scheduler.requests[key].is_prefill_chunk:
                        sampling[key] = sampled.get(key, 0)
                        sampled[key] = sampled.get(key, 0) + 1
                flying.append((free_at if busy else now, output, sampling, reported))
                silent = 0 if busy or told or reported or self._victims else silent + 1
                if len(flying) < 2 and (busy or self.scheduler.has_requests()):
                    continue
            elif not flying:
                if self.next >= len(self.rows):
                    return now
                now = max(now, self.rows[self.next].arrival_s)
                continue
            end, output, sampling, reported = flying.popleft()
            now = max(now, end)
            for key, which in sampling.items():
                if which is not None:
                    sampling[key] = min(which, self.rows[int(key)].output_tokens - 1)
            ended = self._deliver(output, sampling, end, reported)
            if silent > 2 and self.scheduler.has_requests():
                # Those in flight are silent as well: nothing changes before a copy ends or a request arrives.
                if not (later := self._next_facts()):
                    raise RuntimeError("requests wait for ever")
                now, silent = max(now, min(later)), 0

    def _step(self, now: float, ended: list[str]) -> tuple[Any, float, Any]:
        """Schedule; what is to be computed, how long that takes, and what the connector is to do."""
        self._loads.clear()
        before, self.now = len(self.steps), now
        self.scheduler.finished_req_ids = dict.fromkeys(ended)
        output, price = self._schedule(now)
        self._tell(before, output.kv_connector_metadata)
        return output, price, output.kv_connector_metadata

    def _next_facts(self) -> list[float]:
        """When copies under way end, and when the next request arrives."""
        arrivals = [row.arrival_s for row in self.rows[self.next : self.next + 1]]
        files = [end for end, _ in self.files.jobs] if self.files else []
        return [*(end for end, *_ in self._flying), *files, *arrivals]

    def _asked(self) -> bool:
        """Whether the step has asked for chunks among the files: the next one has the answer."""
        if self.files is None:
            return False
        asked, self.files.asked = self.files.asked, False
        return asked

    def _deliver(self, output: Any, sampling: Any, now: float, reported: Any) -> list[str]:
        self.now = max(self.now, now)
        return super()._deliver(output, sampling, now, reported)

    def _tell(self, before: int, meta: Any) -> None:
        text = ""
        if self._loads:
            text += " load " + " ".join(f"{number}:{tokens}" for number, tokens in self._loads)
        if meta.store_jobs:
            jobs = meta.store_jobs.values()
            text += " store " + " ".join(f"{int(job.req_id)}:{len(job.src_spec.block_ids)}" for job in jobs)
        if meta.jobs_to_flush:
            text += f" flush {len(meta.jobs_to_flush)}"
        if text:
            self.copies.append((len(self.steps), before, text))
        for number, tokens in self._loads:
            self.loaded[number] = self.loaded.get(number, 0) + tokens

    # -- the worker --------------------------------------------------------------------------------------------------

    def _begin(self, meta: Any, now: float, computed_at: float) -> float:
        """Start what is to start with the step once all before it is computed; until when the host waits."""
        flushed = meta.jobs_to_flush or ()
        for number in sorted(flushed):
            if number in meta.store_jobs:
                self._unsubmitted[number] = meta.store_jobs.pop(number)
        self._submit_all("store", self._unsubmitted, computed_at)
        self._unsubmitted = {}
        return max([now, *(end for end, number, *_ in self._flying if number in flushed)])

    def _submit_all(self, kind: str, jobs: dict[int, Any], now: float) -> None:
        seconds = self.options.load_s_per_block if kind == "load" else self.options.store_s_per_block
        for number, job in jobs.items():
            spec = job.dst_spec if kind == "load" else job.src_spec
            end = max(now, self._free_at[kind]) + len(spec.block_ids) * seconds
            self._free_at[kind] = end
            self._flying.append((end, number, kind, job.req_id))

    def _poll(self, now: float) -> Any:
        done = [job for job in self._flying if job[0] <= now + ARRIVAL_SLACK]
        if not done:
            return None
        self._flying = [job for job in self._flying if job[0] > now + ARRIVAL_SLACK]
        return KVConnectorOutput(
            finished_recving={request for _, _, kind, request in done if kind == "load"} or None,
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs={job[1]: 1 for job in done}),
        )


def ask(rows: Sequence[Row], options: OffloadOptions) -> dict[str, Any]:
    """vLLM's answer for a workload, which must be sorted by arrival."""
    return OffloadOracle(rows, options).run()
