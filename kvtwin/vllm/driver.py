"""`Driver`: an engine of ours that is told what happens in vLLM's, and says what each step of vLLM's computes.

It knows no vLLM beyond the attributes of a request. Steps are scheduled serially or, as vLLM's async scheduling has
it, ahead: then a token's time is what the plan is priced at until it has come.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtwin.vllm.blocks import VllmBlocks
from sim.cost.pricing import Lanes, Pricer
from sim.engine.engine import Engine
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Parts, Scheduler
from sim.engine.sequence import IGNORED, Sequence
from sim.errors import InvariantError, UserError
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory
from sim.parts.stage.direct import Direct
from sim.run.prepare import Setup
from sim.systems.base import Policy
from traces.request import Request

if TYPE_CHECKING:
    KVCacheManager = VllmRequest = Any


class Step(NamedTuple):
    """What one step of vLLM's computes."""

    num_tokens: dict[str, int]
    """Tokens of each request, by its id."""
    started: "list[VllmRequest]"
    """Those that did not run before, in order."""


class Flight(NamedTuple):
    """A plan whose tokens have not come."""

    plan: IterationPlan
    seqs: list[Sequence]
    ended: list[Sequence]
    """Scheduled ahead: those whose last tokens they are."""
    seconds: float


class Driver:
    """One engine.

    Args:
        setup: the preset, what it predicts with, and vLLM's limits, whose `num_cpu_blocks` is 0.
        manager, preempt: as `VllmBlocks` has them.
        clock: now, s, on the clock of requests' arrivals.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        manager: "KVCacheManager",
        preempt: "Callable[[VllmRequest], None]",
        clock: Callable[[], float],
    ) -> None:
        policy, limits = setup.policy, setup.limits
        deployment = Deployment(setup.model, setup.hardware, setup.tp, setup.cost, setup.profile)
        self.memory = VllmBlocks(limits, manager, preempt)
        parts = policy.parts(limits, deployment)
        check_parts(policy, parts)
        scheduler = Scheduler(replace(parts, memory=self.memory), limits, GapCollector(), deployment)
        self.engine = Engine(scheduler, policy.length_predictor(setup.scenario.seed), self._end)
        self.refused: list[tuple[VllmRequest, str]] = []
        """Requests that the policy does not serve, and why, since this was last emptied."""
        self._clock = clock
        self._seqs: dict[str, Sequence] = {}
        self._num_requests = 0
        self._flying: deque[Flight] = deque()
        self._dropped: list[VllmRequest] = []
        self._now_s = self._free_s = 0.0
        self._lanes = Lanes()
        self._pricer = Pricer(
            deployment.cost, self._lanes, lambda end_s, move: None, layers=deployment.model.num_layers, num_groups=1,
            block_bytes=limits.block_bytes,
        )  # fmt: skip

    def now_s(self) -> float:
        """Now, s. A clock that is set back stands still."""
        self._now_s = max(self._now_s, self._clock())
        return self._now_s

    # -- what vLLM tells -----------------------------------------------------------------------------------------------

    def add(self, request: "VllmRequest") -> None:
        """`request` waits. Nothing is known of its output but `max_tokens`."""
        limits = self.engine.scheduler.limits
        prompt_tokens = request.num_prompt_tokens
        known = Request(
            self._num_requests, request.arrival_time, prompt_tokens, request.max_tokens, priority=request.priority
        )
        self._num_requests += 1
        seq = self.engine.add_request(known)
        seq.output_tokens = min(seq.output_tokens, limits.max_model_len - prompt_tokens)
        self._seqs[request.request_id], self.memory.requests[seq] = seq, request

    def came(self) -> None:
        """The tokens of the oldest step in flight came, and vLLM has ended the requests whose last they were."""
        now_s = self.now_s()
        flight = self._flying.popleft()
        if self.engine.schedules_ahead:
            self.engine.deliver(flight.ended)
            self._free_s = now_s + (self._flying[0].seconds if self._flying else 0.0)
        else:
            self.engine.commit(flight.plan, StepTimes(1, now_s, 0.0, 0.0, now_s, 1))
        for seq in flight.seqs:
            request = self.memory.requests.get(seq)
            if request is not None and request.is_finished():
                self._stop(seq, request.num_output_tokens)
        dropped, self._dropped = self._dropped, []
        self.drop(dropped)

    def drop(self, requests: "Iterable[VllmRequest]") -> None:
        """vLLM has ended `requests`, whatever they were to have yet (a client has left)."""
        if self._flying and not self.engine.schedules_ahead:
            # The step that computes them is yet to be counted.
            self._dropped += requests
            return
        for request in requests:
            seq = self._seqs.get(request.request_id)
            if seq is not None:
                self._stop(seq)

    # -- what vLLM asks ------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """What the next step computes. Requests that lose their blocks for it are preempted in vLLM by then."""
        now_s = self.now_s()
        plan = self.engine.schedule(now_s)
        if plan is None:
            return Step({}, [])
        if plan.beside or plan.after or plan.awaited or plan.behind or plan.pulled or plan.streamed:
            raise InvariantError("a plan that copies KV")
        num_tokens = dict.fromkeys(plan.decodes, 1) | {chunk.seq: chunk.num_new for chunk in plan.chunks}
        seqs = list(num_tokens)
        ids = {self.memory.requests[seq].request_id: tokens for seq, tokens in num_tokens.items()}
        seconds, ended = 0.0, []
        if self.engine.schedules_ahead:
            start_s = max(now_s, self._free_s)
            times = self._pricer.step(plan, start_s)
            seconds, self._free_s = times.end_s - start_s, times.end_s
            ended = self.engine.commit_ahead(plan, times)
        self._flying.append(Flight(plan, seqs, ended, seconds))
        return Step(ids, list(self.memory.placed))

    # -- for a pretended device ----------------------------------------------------------------------------------------

    @property
    def latest(self) -> IterationPlan:
        """The plan of the latest step, whose tokens have not come."""
        return self._flying[-1].plan

    @property
    def ends_s(self) -> float:
        """Scheduled ahead: when it ends by price, s."""
        return self._free_s

    @property
    def host_free_s(self) -> float:
        """When the engine's host is done with it, by price, s."""
        return self._lanes.host.free_s

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _stop(self, seq: Sequence, output_tokens: int | None = None) -> None:
        """`seq` ends now, with `output_tokens` where these are all of its output; what is in flight is dropped."""
        scheduler = self.engine.scheduler
        for flight in self._flying:
            if seq in flight.ended:
                flight.ended.remove(seq)
        if seq in scheduler.batch.members:
            scheduler.take_out(seq)
        elif seq in scheduler.batching.partials:
            scheduler.batching.drop_partial(seq)
        elif seq in scheduler.last_in_flight:
            del scheduler.last_in_flight[seq]
        elif scheduler.order.remove(seq):
            scheduler.ignore(seq, "stopped")
            self._forget(seq)
            return
        if output_tokens is not None:
            seq.num_generated = seq.output_tokens = output_tokens
        scheduler.end(seq, self._now_s)
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        request = self.memory.requests.pop(seq, None)
        if request is not None:
            self._seqs.pop(request.request_id, None)

    def _end(self, seq: Sequence) -> None:
        """Hears of every sequence that the engine has ended."""
        request = self.memory.requests.get(seq)
        if request is None:
            # vLLM had ended it before.
            return
        if seq.status is IGNORED:
            self.refused.append((request, seq.error))
        elif not request.is_finished():
            raise InvariantError(f"{seq} has ended, and vLLM's {request.request_id} has not")
        self._forget(seq)


def check_parts(policy: Policy, parts: Parts) -> None:
    """UserError unless vLLM's blocks and steps can carry out what `parts` decide."""
    names = policy.names
    wanted = ""
    if type(parts.memory) not in (PagedMemory, PrefixMemory) or parts.memory.backing is not None:
        wanted = f"memory={names['memory']}: vLLM's blocks are memory=paged"
    elif parts.eviction.moves_whole:
        wanted = f"eviction={names['eviction']}: vLLM's steps copy nothing to the host; take eviction=recompute"
    elif type(parts.stage) is not Direct:
        wanted = f"stage={names['stage']}: a request decodes where it prefills; take stage=direct"
    if wanted:
        raise UserError(f"{policy.name} in vLLM: {wanted}")
