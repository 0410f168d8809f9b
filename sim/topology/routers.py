"""Routers: which engine gets a request. Each answers from the request, its own memory and the views, never a clock.

A view is the engine as it stands when the request arrives: iterations that have begun then have not ended.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Protocol
from zlib import crc32

from sim.topology.prefix_tree import PrefixTree, hash_ids_of
from traces.request import Request

REJECT = -1
"""Instead of a place: the request is turned away."""


class EngineView(Protocol):
    """What a router may know of an engine."""

    @property
    def num_in_flight(self) -> int:
        """Requests sent to the engine that have not ended."""
        ...

    @property
    def tokens_in_flight(self) -> int:
        """Their prompts' tokens."""
        ...

    @property
    def num_waiting(self) -> int:
        """Those of them that wait for their prefill."""
        ...

    @property
    def running_until_s(self) -> float:
        """When the iteration under way ends, s; 0 where there is none. Of engines that decode not to be relied on."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Tokens for which the GPU's KV blocks have room."""
        ...

    @property
    def kv_usage(self) -> float:
        """Share of these blocks that sequences hold (vLLM's kv_cache_usage_perc). For routers that see KV."""
        ...

    def prompt_tokens_of(self, request: Request) -> tuple[int, int]:
        """Tokens of a prompt that the engine does not have cached, and those of the free blocks that it would take."""
        ...


class Router(ABC):
    """Chooses an engine for each request, in order of arrival."""

    ready_s = 0.0
    """When the engine chosen last may see its request, s, if that is later than the arrival."""
    reason = ""
    """Why the last request that was turned away was."""
    sees_kv = False
    """Whether it asks how full KV memory is. Engines then go iteration by iteration: within a jump it is not known."""

    @abstractmethod
    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        """The place in `engines` of the one that gets `request`, or `REJECT`."""


class RoundRobin(Router):
    """One after the other, whatever their state."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        chosen = self._next % len(engines)
        self._next = chosen + 1
        return chosen


class LeastLoaded(Router):
    """Fewest requests in flight; the first of those that tie."""

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        loads = [engine.num_in_flight for engine in engines]
        return loads.index(min(loads))


class FewestWaitingTokens(Router):
    """Join the shortest queue, counted in prompt tokens yet to be computed (Splitwise); the first of those that tie."""

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        loads = [engine.waiting_tokens for engine in engines]
        return loads.index(min(loads))


class PowerOfTwo(Router):
    """The less loaded of two drawn at random (Mitzenmacher, 2001): nearly as even, and only two are asked."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        if len(engines) == 1:
            return 0
        one, other = self._random.sample(range(len(engines)), 2)
        return other if engines[other].num_in_flight < engines[one].num_in_flight else one


class SessionAffinity(Router):
    """All turns of a session go to one engine, by the hash of its id; requests without one go round robin."""

    def __init__(self) -> None:
        self._others = RoundRobin()

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        if not request.session_id:
            return self._others.route(request, engines)
        return crc32(request.session_id.encode()) % len(engines)


class PromptTrees(Router):
    """The engine that was sent the longest prefix of the prompt (MemServe's global prompt trees).

    Ties, and prompts of which the trace names no blocks, go to the fewest requests in flight. Answers count as sent.
    """

    def __init__(self) -> None:
        self._sent = PrefixTree()

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        loads = [engine.num_in_flight for engine in engines]
        ids = request.hash_ids
        places = self._sent.longest(ids)[1] or range(len(engines))
        chosen = min(places, key=lambda place: (loads[place], place))
        if len(ids) * request.hash_block_tokens >= request.prompt_tokens:
            ids += request.output_hash_ids
        self._sent.add(ids, chosen)
        return chosen


class PrefixAffinity(Router):
    """The engine that was sent the longest prefix of the prompt, unless load or a short match speaks against it.

    SGLang's router (policy `cache_aware`, its defaults): with the most and the fewest requests in flight apart by more
    than 64 and by more than a factor of 1.5, the least loaded engine gets the request. Else, if more than 0.3 of the
    prompt was sent somewhere before, the engine that was sent most of it. Else the least loaded. Ties go to the least
    loaded, then to the first. What was sent where is the router's own memory, in blocks of the trace's hash ids: it
    needs no word from the engines, and outlasts what they evict. SGLang's forgets beyond 2^26 characters an engine;
    this one does not.
    """

    def __init__(self, threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5) -> None:
        self.threshold, self.balance_abs, self.balance_rel = threshold, balance_abs, balance_rel
        self._sent = PrefixTree()

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        ids = hash_ids_of(request, "--router prefix-affinity")
        loads = [engine.num_in_flight for engine in engines]
        least, most = min(loads), max(loads)
        chosen = loads.index(least)
        if most - least <= self.balance_abs or most <= self.balance_rel * least:
            blocks, places = self._sent.longest(ids)
            if blocks * request.hash_block_tokens > self.threshold * request.prompt_tokens:
                chosen = min(places, key=lambda place: (loads[place], place))
        self._sent.add(ids, chosen)
        return chosen
