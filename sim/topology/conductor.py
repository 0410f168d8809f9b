"""`Conductor`: Mooncake's choice of a prefill engine, by estimated TTFT, and which requests it rejects.

Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025 (arXiv 2407.00079), Algorithm 1. For every
prefill engine, with `best` the longest prefix that any node's store has of the prompt and `local` its own node's,

    TTFT = queue + prefill(prompt, local)              where best <= threshold x local,
    TTFT = queue + transfer(best) + prefill(prompt, best)        elsewhere;

the least wins. A transferred prefix stays in the store of the chosen node: hot blocks come to be on several. A request
is turned away where its TTFT would break its SLO, or the time between tokens at every decode engine, or none has room:
with the load of now (early rejection), or as it is predicted for when the prefill ends (each request decodes for the
same time). A prompt of which the trace names no blocks shares nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sim.topology.routers import REJECT, EngineView, Router
from sim.topology.store import GlobalStore
from traces.request import Request

Rejection = Literal["none", "early", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """What the conductor knows of the machines, all in seconds.

    Attributes:
        prefill_s: of a request's prompt with so many tokens loaded.
        decode_s: of an iteration of so many sequences with so many tokens of context; infinite without room for them.
        transfer_s: of so many tokens from node to node, from a time on, waiting for their links included.
    """

    prefill_s: Callable[[Request, int], float]
    decode_s: Callable[[int, int], float]
    transfer_s: Callable[[int, int, int, float], float]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the conductor is told: the threshold of Algorithm 1, SLOs (s), and a request's predicted decode (s)."""

    threshold: float
    rejection: Rejection
    ttft_slo_s: float
    tbt_slo_s: float
    decode_s: float
    block_size: int
    """Of the engines: they load whole blocks."""


class Conductor(Router):
    """Sends each prompt where it is expected to have its first token soonest.

    Args:
        decoders: views of the engines that decode.
        transfer: starts to copy so many tokens from node to node at a time; returns the end, s.
        grant: tells the engine at a place that so many tokens of a request are in its node's memory.
    """

    def __init__(
        self,
        store: GlobalStore,
        rules: Rules,
        estimates: Estimates,
        decoders: Sequence[EngineView],
        *,
        transfer: Callable[[int, int, int, float], float],
        grant: Callable[[int, Request, int], None],
    ) -> None:
        self.store, self.rules, self.estimates, self.decoders = store, rules, estimates, decoders
        self._transfer, self._grant = transfer, grant
        # Of each prefill engine: estimates for the prompts that were sent there and may still wait, s.
        self._queues: list[deque[float]] = []
        # When requests that were taken are to begin to decode, s, and their prompt's tokens.
        self._decodes: list[tuple[float, int]] = []

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        now_s, rules, block_tokens = request.arrival_s, self.rules, request.hash_block_tokens
        path = self.store.path(request.hash_ids)
        lengths = self.store.lengths(path, now_s)
        best = max(lengths)
        self._queues = self._queues or [deque() for _ in engines]
        estimates: list[tuple[float, int, int]] = []
        for place, engine in enumerate(engines):
            used = best if best > rules.threshold * lengths[place] else lengths[place]
            tokens, begin_s = self._whole(request, used), self._queue_s(place, engine, now_s)
            if used > lengths[place]:
                # It travels while others are computed.
                source = lengths.index(best)
                begin_s = max(begin_s, self.estimates.transfer_s(source, place, tokens, now_s))
            estimates.append((begin_s + self.estimates.prefill_s(request, tokens), place, used))
        ttft_s, chosen, hit = min(estimates)
        if self._turns_away(request, ttft_s):
            return REJECT
        tokens, self.ready_s = self._whole(request, hit), now_s
        if hit > lengths[chosen]:
            self.ready_s = self._transfer(lengths.index(best), chosen, tokens, now_s)
            self.store.add_at(self.ready_s, chosen, path[:hit], block_tokens)
        elif hit:
            self.store.add(chosen, path[:hit], block_tokens)
        if tokens:
            self._grant(chosen, request, tokens)
        self._queues[chosen].append(self.estimates.prefill_s(request, tokens))
        self._decodes.append((now_s + ttft_s, request.prompt_tokens))
        return chosen

    def _whole(self, request: Request, blocks: int) -> int:
        """Tokens that an engine can load of a prefix: whole blocks of its own, and not the last token."""
        tokens = min(blocks * request.hash_block_tokens, request.prompt_tokens - 1)
        return tokens // self.rules.block_size * self.rules.block_size

    def _queue_s(self, place: int, engine: EngineView, now_s: float) -> float:
        """What is left of the iteration under way, and what the sequences take that wait for the next."""
        queue = self._queues[place]
        while len(queue) > engine.num_waiting:
            queue.popleft()
        return max(0.0, engine.running_until_s - now_s) + sum(queue)

    def _turns_away(self, request: Request, ttft_s: float) -> bool:
        rules = self.rules
        if rules.rejection == "none":
            return False
        if ttft_s > rules.ttft_slo_s:
            self.reason = "rejected: its first token would come too late"
            return True
        if rules.rejection == "early":
            loads = [(engine.num_in_flight, engine.tokens_in_flight) for engine in self.decoders]
        else:
            at_s = request.arrival_s + ttft_s
            self._decodes = [it for it in self._decodes if it[0] + rules.decode_s > request.arrival_s]
            then = [tokens for begin_s, tokens in self._decodes if begin_s <= at_s < begin_s + rules.decode_s]
            loads = [(len(then) // len(self.decoders), sum(then) // len(self.decoders))]
        self.reason = "rejected: tokens would come too slowly"
        return all(
            self.estimates.decode_s(num + 1, tokens + request.prompt_tokens) > rules.tbt_slo_s for num, tokens in loads
        )
