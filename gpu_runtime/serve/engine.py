"""`EngineThread`: the engine on a thread of its own, and the two ways across to the event loop that serves HTTP.

In: requests and cancels, through queues that the engine empties at iteration boundaries. Out: tokens, once an
iteration, and ends, each a callback on the event loop. The loop's side of a request is only touched by the loop's
thread, the engine's side only by the engine's.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from threading import Thread
from typing import cast

import msgspec
import torch

from gpu_runtime.device import TorchDevice
from gpu_runtime.instance import LiveInstance
from gpu_runtime.live import recorder
from gpu_runtime.machine.live_memory import telling_shortage
from gpu_runtime.model.sampling import GREEDY, Sampling
from gpu_runtime.serve.metrics import EngineState, Metrics
from gpu_runtime.serve.ticket import End, Events, Ticket, Token
from sim.cost.pricing import Lanes
from sim.engine.engine import Engine
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from sim.results.series import Series
from traces.request import Request

CANCELLED = "cancelled"


class Aborted(Exception):
    """The server ends without waiting for its requests."""


class EngineThread:
    """Serves on a thread of its own until closed and drained.

    Args:
        lanes: where the computation and the copies of every iteration are noted.
        series: samples of the pools, where they are kept.
        seed: of requests that name none, with their number.
    """

    def __init__(
        self, engine: Engine, device: TorchDevice, metrics: Metrics, lanes: Lanes, series: Series | None, seed: int = 0
    ) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.device, self.metrics = device, metrics
        self.instance = LiveInstance(self.engine, device, self, observer=self._observe, is_open=self._may_get_more)
        self.state = EngineState()
        self.error: BaseException | None = None
        self.queued: set[Ticket] = set()
        """Accepted, and without a first token."""
        self.unfinished: set[Ticket] = set()
        self.ready, self.finished = asyncio.Event(), asyncio.Event()
        self._record = recorder(lanes, None if series is None else series.observe, device.memory.engine.spans)
        self._arrived: deque[Ticket] = deque()
        self._left: deque[Ticket] = deque()
        self._closed = self._aborted = False
        self._accepted = 0
        self._open: dict[int, Ticket] = {}
        self._fresh: list[tuple[Ticket, Token, float]] = []
        self._log_end = self.engine.on_end
        self.engine.on_end = self._end
        device.prompt_of = lambda request: self._open[request.request_id].prompt
        device.sampling_of = lambda request: self._open[request.request_id].sampling
        device.on_token = self._take_token
        self._seed = seed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name="kvtwin-engine", daemon=True)

    # -- the event loop's side -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Warm up and begin to serve; if that went wrong, `error` says so."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self.ready.wait()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: frozenset[int],
        min_tokens: int,
        events: Events | None = None,
        index: int = 0,
        sampling: Sampling = GREEDY,
    ) -> Ticket:
        """Accept a request; it arrives now. Its tokens go to `events`, or to a queue of its own, with the `index`."""
        now_s = self.device.now_s()
        request = Request(self._accepted, now_s, len(prompt), max_tokens)
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seed * 1_000_003 + request.request_id)
        ticket = Ticket(request, prompt, stop, min_tokens, events or Events(), index, sampling, last_s=now_s)
        self._accepted += 1
        self.queued.add(ticket)
        self.unfinished.add(ticket)
        self.metrics.accepted += 1
        self.metrics.prompt_tokens += len(prompt)
        self._arrived.append(ticket)
        self.device.wake()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The client of a request has left: drop it, unless it has ended already."""
        if not ticket.ended:
            self._left.append(ticket)
            self.device.wake()

    def stop(self, ticket: Ticket) -> None:
        """The text of a request is complete: it ends with its next token at the latest, and not as cancelled."""
        ticket.has_text = True
        self.cancel(ticket)

    def close(self) -> None:
        """Take no more requests; `finished` is set when those accepted have ended."""
        self._closed = True
        self.device.wake()

    def abort(self) -> None:
        """End at the next iteration boundary."""
        self._aborted = True
        self.device.wake()

    def _on_loop(self, callback: Callable[..., object], *args: object) -> None:
        cast(asyncio.AbstractEventLoop, self._loop).call_soon_threadsafe(callback, *args)

    def _hand_over(self, fresh: list[tuple[Ticket, Token, float]]) -> None:
        metrics = self.metrics
        metrics.output_tokens += len(fresh)
        for ticket, token, time_s in fresh:
            (metrics.itl_s if ticket.answered else metrics.ttft_s).add(time_s - ticket.last_s)
            ticket.last_s = time_s
            if not ticket.answered:
                ticket.answered = True
                self.queued.discard(ticket)
            ticket.events.put_nowait((ticket.index, token))

    def _conclude(self, ticket: Ticket, end: End, outcome: str) -> None:
        ticket.ended = True
        self.queued.discard(ticket)
        self.unfinished.discard(ticket)
        self.metrics.ended[outcome] += 1
        ticket.events.put_nowait((ticket.index, end))

    def _stop(self) -> None:
        """The thread has ended; requests without an answer get an error."""
        why = "the server was stopped" if self.error is None else "the engine failed"
        for ticket in list(self.unfinished):
            self._conclude(ticket, End("error", why, 500), "failed")
        self.ready.set()
        self.finished.set()

    # -- the engine's side: events in ----------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When the next request arrived that the engine has not seen, s."""
        return self._arrived[0].request.arrival_s if self._arrived else inf

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        """Hand over what has arrived, and take back requests whose client has left."""
        if self._aborted:
            raise Aborted
        while self._arrived and self._arrived[0].request.arrival_s <= until_s:
            ticket = self._arrived.popleft()
            self._open[ticket.request.request_id] = ticket
            ticket.seq = cast(Sequence, to(ticket.request))
        for _ in range(len(self._left)):
            ticket = self._left.popleft()
            if ticket.seq is None:
                self._left.append(ticket)
            elif ticket.request.request_id in self._open:
                self._take_back(ticket, ticket.seq)
        scheduler = self.scheduler
        pools = scheduler.gpu.free, scheduler.host.free
        queues = scheduler.num_running, scheduler.num_waiting, scheduler.num_swapped
        counters = scheduler.counters
        prefixes = counters.prefix_query_tokens, counters.prefix_hit_tokens
        self.state = EngineState(*queues, *pools, counters.preemptions, *prefixes)

    def _may_get_more(self) -> bool:
        # In this order: after closing nothing is added, so a queue seen empty then stays empty.
        return not self._closed or bool(self._arrived)

    def _take_back(self, ticket: Ticket, seq: Sequence) -> None:
        """Cancel; what has a token still to compute ends in error as well, with what it got thrown away."""
        self.engine.cancel(seq)
        if ticket.has_text:
            return
        if seq.request.request_id in self._open and not seq.error:
            seq.error = f"ignored: {CANCELLED}"
            ignored = self.scheduler.counters.ignored
            ignored[CANCELLED] = ignored.get(CANCELLED, 0) + 1

    # -- the engine's side: tokens and ends out ------------------------------------------------------------------

    def _take_token(self, seq: Sequence, token: int, time_s: float) -> None:
        ticket = self._open[seq.request.request_id]
        count = 0
        if token in ticket.stop:
            count = len(self.device.tokens.of(seq)) - seq.request.prompt_tokens
            if count >= ticket.min_tokens:
                ticket.stopped = True
        self._fresh.append((ticket, Token(token, ticket.stopped), time_s))
        if ticket.stopped:
            self.instance.stop(seq, count, time_s)

    def _observe(self, plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        self._send()
        self._record(plan, start_s, times)

    def _send(self) -> None:
        if self._fresh:
            self._on_loop(self._hand_over, self._fresh)
            self._fresh = []

    def _end(self, seq: Sequence) -> None:
        self._log_end(seq)
        self._send()
        ticket = self._open.pop(seq.request.request_id)
        if not seq.error or ticket.has_text:
            reason = "stop" if ticket.stopped or ticket.has_text else "length"
            self._on_loop(self._conclude, ticket, End(reason), reason)
            return
        cause, _, reason = seq.error.partition(": ")
        # What the scheduler refuses is the request's fault, what failed is not.
        end = End("error", reason, 400 if cause == "ignored" else 500)
        outcome = CANCELLED if reason == CANCELLED else cause
        self._on_loop(self._conclude, ticket, end, outcome)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                with telling_shortage():
                    self.device.warm_up()
                    self.device.start()
                self._on_loop(self.ready.set)
                self.instance.serve()
                self._check_nothing_is_held()
        except Aborted:
            pass
        except BaseException as error:  # Whatever it is, clients must hear of it and the process end.
            self.error = error
        finally:
            self.device.close()
            self._on_loop(self._stop)

    def _check_nothing_is_held(self) -> None:
        """After the last request: InvariantError unless every block of every pool is free again."""
        device, scheduler = self.device, self.scheduler
        device.memory.check()
        device.memory.check_counts()
        held = [pool.num_blocks - pool.free for pool in (scheduler.gpu, scheduler.host)]
        if any(held) or device.memory.placement.held or device.tokens:
            raise InvariantError(f"{held[0]} GPU and {held[1]} host blocks are held after the last request has ended")
