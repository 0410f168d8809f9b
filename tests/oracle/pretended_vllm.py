"""What `kvtwin.vllm.driver` knows of vLLM, pretended: requests, a block pool with prefix caching, the engine's loop.

The rules are those of vLLM 0.33 as `vllm_v1_oracle.py` found them, for full attention: a block is hashed when it is
scheduled to be full of tokens that are known; unhashed blocks are freed to the front of the queue, hashed ones to its
end. `vllm_core.py` is the same with vLLM itself.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from scheduler_replay import BLOCK, Served, tokens_of

from kvtwin.vllm.driver import Driver
from kvtwin.vllm.settings import EngineFacts, make_setup
from sim.cost.pricing import Lanes, Pricer
from traces.request import Request as Asked

TIE_S = 1e-9


class Request:
    """One of vLLM's."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.request_id, self.arrival_time, self.priority = str(asked.request_id), asked.arrival_s, asked.priority
        self.num_prompt_tokens, self.max_tokens = asked.prompt_tokens, asked.output_tokens
        self.tokens = tokens_of(asked)
        self.num_computed_tokens = self.num_output_tokens = 0
        self.in_flight = 0
        """Iterations that sample a token of it and have not ended."""
        self.ended = False
        self.blocks: list[Block] = []

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def is_finished(self) -> bool:
        return self.ended


class Block:
    """One of the pool's."""

    def __init__(self) -> None:
        self.ref_cnt, self.key = 0, None


class Blocks:
    """Blocks of one group."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = (blocks,)

    def __add__(self, other: "Blocks") -> "Blocks":
        return Blocks(self.blocks[0] + other.blocks[0])


class Manager:
    """`KVCacheManager`, as far as the driver asks it."""

    def __init__(self, num_blocks: int, *, caches: bool) -> None:
        self.free_blocks = deque(Block() for _ in range(num_blocks))
        self.caches, self.cached = caches, {}
        self.block_pool = self

    def get_num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def get_computed_blocks(self, request: Request) -> tuple[Blocks, int, int]:
        hits: list[Block] = []
        while len(hits) < (request.num_tokens - 1) // BLOCK:
            found = self.cached.get(tuple(request.tokens[: BLOCK * (len(hits) + 1)]))
            if not found:
                break
            hits.append(found[0])
        return Blocks(hits), len(hits) * BLOCK, 0

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, has_scheduled_reqs: bool, num_new_computed_tokens: int = 0,
        new_computed_blocks: Blocks | None = None, delay_cache_blocks: bool = False,
    ) -> Blocks | None:  # fmt: skip
        hits = new_computed_blocks.blocks[0] if new_computed_blocks else []
        tokens = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        missing = -(-tokens // BLOCK) - len(request.blocks) - len(hits)
        idle = [block for block in hits if not block.ref_cnt]
        if missing + len(idle) > len(self.free_blocks):
            return None
        for block in idle:
            self.free_blocks.remove(block)
        new = [self.free_blocks.popleft() for _ in range(missing)]
        for block in new:
            if block.key is not None:
                self.cached[block.key].remove(block)
                block.key = None
        for block in [*hits, *new]:
            block.ref_cnt += 1
        request.blocks += [*hits, *new]
        if not delay_cache_blocks:
            self.cache_blocks(request, min(tokens, request.num_tokens))
        return Blocks(new)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        for place, block in enumerate(request.blocks[: num_computed_tokens // BLOCK]):
            if self.caches and block.key is None:
                block.key = tuple(request.tokens[: BLOCK * (place + 1)])
                self.cached.setdefault(block.key, []).append(block)

    def free(self, request: Request) -> None:
        idle = []
        for block in reversed(request.blocks):
            block.ref_cnt -= 1
            if not block.ref_cnt:
                idle.append(block)
        self.free_blocks.extendleft(reversed([block for block in idle if block.key is None]))
        self.free_blocks.extend(block for block in idle if block.key is not None)
        request.blocks = []


class Core:
    """The engine's loop, serial or with two batches in flight."""

    def __init__(self, requests: list[Asked], facts: EngineFacts, told: Mapping[str, Any]) -> None:
        setup = make_setup(told, facts, None)
        self.asked = list(map(Request, requests))
        self.arriving = deque(self.asked)
        self.now_s = 0.0
        self.ahead = facts.async_scheduling
        self.found, self.running = Served(), []
        self.manager = Manager(facts.num_gpu_blocks, caches=facts.enable_prefix_caching)
        self.driver = Driver(setup, manager=self.manager, preempt=self._preempt, clock=lambda: self.now_s)
        self.lanes = Lanes()
        self.pricer = Pricer(
            setup.cost, self.lanes, lambda *_: None, layers=1, num_groups=1, block_bytes=setup.limits.block_bytes
        )
        self.stops: dict[int, int] = {}
        """Output tokens with which a request ends, where that is sooner than it asked for (a stop token)."""
        self.leaves: dict[int, int] = {}
        """Iterations after which its client leaves."""

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.found.preempted.append(request.asked.request_id)

    def _leave(self, request: Request) -> None:
        """Its client has left."""
        if request.ended or request in self.arriving:
            return
        request.ended = True
        if request in self.running:
            self.running.remove(request)
        self.manager.free(request)
        self.driver.drop([request])

    def run(self) -> Served:
        """Serve the whole workload."""
        flying: deque[tuple[float, list[Request]]] = deque()
        while True:
            if self.ahead:
                self.now_s = max(self.now_s, self.driver.host_free_s)
            while self.arriving and self.arriving[0].arrival_time <= self.now_s + TIE_S:
                self.driver.add(self.arriving.popleft())
            launched = self._launch()
            if launched is not None:
                flying.append(launched)
            if flying and (launched is None or not self.ahead or len(flying) == 2):
                end_s, sampling = flying.popleft()
                self.now_s = max(self.now_s, end_s)
                for number in [i for i, count in self.leaves.items() if count == len(self.found.steps)]:
                    self._leave(self.asked[number])
                self._land(sampling)
            elif launched is None:
                if not self.arriving:
                    return self.found
                self.now_s = max(self.now_s, self.arriving[0].arrival_time)

    def _launch(self) -> tuple[float, list[Request]] | None:
        step = self.driver.schedule()
        self.running += step.started
        if not step.num_tokens:
            return None
        chosen = [request for request in self.running if request.request_id in step.num_tokens]
        assert len(chosen) == len(step.num_tokens)
        plan = self.driver.latest
        end_s = self.driver.ends_s if self.ahead else self.pricer.step(plan, self.now_s).end_s
        entries = [(request.asked.request_id, step.num_tokens[request.request_id]) for request in chosen]
        self.found.steps.append((end_s, entries, len(self.manager.free_blocks)))
        for request in chosen:
            request.num_computed_tokens += step.num_tokens[request.request_id]
        sampling = []
        for request in chosen:
            if request.num_computed_tokens >= request.num_tokens + request.in_flight:
                request.in_flight += 1
                sampling.append(request)
        return end_s, sampling

    def _land(self, sampling: list[Request]) -> None:
        for request in sampling:
            request.in_flight -= 1
            if request.ended:
                continue
            request.num_output_tokens += 1
            if self.ahead and request in self.running:
                # What was unknown when it was scheduled is hashed on delivery, of the last token, too.
                self.manager.cache_blocks(request, request.num_computed_tokens - request.in_flight)
            last = self.stops.get(request.asked.request_id, request.max_tokens)
            if request.num_output_tokens == last:
                request.ended = True
                if request in self.running:
                    self.running.remove(request)
                self.manager.free(request)
                self.found.finish_s[request.asked.request_id] = self.now_s
        self.driver.came()
