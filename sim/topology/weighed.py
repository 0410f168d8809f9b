"""Routers that weigh prefixes against load: llm-d's scorers and Dynamo's cost, with the weights that they ship with.

They see how full the engines' KV memory is at the moment of an arrival, so that engines go iteration by iteration.
What real ones see is older: llm-d reads metrics every 50 ms, Dynamo hears of events.
"""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar

from sim.errors import UserError
from sim.topology.prefix_tree import hash_ids_of
from sim.topology.routers import EngineView, Router
from traces.named_numbers import named_numbers
from traces.request import Request

MATCHED_TOKENS = 256 * 16
"""Of a prompt, which llm-d's prefix scorer compares: 256 of vLLM's blocks."""
MOST_WEIGHT = 1e6


class Weighed(Router):
    """The engine that costs least, drawn among those that tie."""

    sees_kv = True
    shipped: ClassVar[Mapping[str, float]]
    """Weights by name."""

    def __init__(self, seed: int, **weights: float) -> None:
        """`weights` other than those shipped."""
        self._random, self.weights = Random(seed), {**self.shipped, **weights}

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        costs = self.costs(request, engines)
        least = min(costs)
        return self._random.choice([place for place, cost in enumerate(costs) if cost == least])

    @abstractmethod
    def costs(self, request: Request, engines: Sequence[EngineView]) -> list[float]:
        """Of sending it to each engine."""


class LlmD(Weighed):
    """The highest sum of three scores from 0 to 1 (llm-d's endpoint picker, its default profile).

    Queue, weight 2: requests that wait, 1 for the fewest and 0 for the most. KV cache, weight 2: the share that is
    free. Prefix, weight 3: the share of the prompt's first 4,096 tokens that was sent to the engine before, as far as
    the router remembers: as many blocks an engine as that has, the latest. Source: gateway-api-inference-extension,
    `scorer/queue.go`, `kvcache_utilization.go`, `multi/prefix/plugin.go`, and its default configuration.
    """

    shipped = {"queue": 2.0, "kv": 2.0, "prefix": 3.0}  # noqa: RUF012 - read only

    def __init__(self, seed: int, **weights: float) -> None:
        super().__init__(seed, **weights)
        self._sent: dict[int, OrderedDict[int, None]] = {}
        """By an engine's place, ids of the blocks that it was sent, the latest last."""

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        chosen = super().route(request, engines)
        sent, tokens = self._sent.setdefault(chosen, OrderedDict()), max(1, request.hash_block_tokens)
        for block in self._compared(request):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) * tokens > engines[chosen].kv_tokens:
            sent.popitem(last=False)
        return chosen

    def costs(self, request: Request, engines: Sequence[EngineView]) -> list[float]:
        compared, weights = self._compared(request), self.weights
        waiting = [engine.num_waiting for engine in engines]
        least, most = min(waiting), max(waiting)
        found = []
        for place, (engine, num_waiting) in enumerate(zip(engines, waiting, strict=True)):
            score = weights["queue"] * ((most - num_waiting) / (most - least) if most > least else 1.0)
            score += weights["kv"] * (1.0 - engine.kv_usage)
            if compared and (sent := self._sent.get(place)):
                score += weights["prefix"] * sum(block in sent for block in compared) / len(compared)
            found.append(-score)
        return found

    def _compared(self, request: Request) -> tuple[int, ...]:
        ids = hash_ids_of(request, "--router llm-d")
        return ids[: max(1, MATCHED_TOKENS // request.hash_block_tokens)]


class Dynamo(Weighed):
    """The least work (NVIDIA Dynamo's KV router): blocks to prefill, times a weight, plus blocks in use.

    To prefill are the prompts that wait, and of this one what the engine does not have cached. In use are the blocks of
    those that run, of the prompts that wait, and what this prompt would take. The weight is 1 and the temperature 0, as
    shipped. Source: ai-dynamo/dynamo, `docs/router/README.md`, "Cost Function". There a waiting prompt counts less what
    it hits; here it counts whole.
    """

    shipped = {"overlap": 1.0}  # noqa: RUF012 - read only

    def costs(self, request: Request, engines: Sequence[EngineView]) -> list[float]:
        found = []
        for engine in engines:
            tokens, taken_tokens = engine.prompt_tokens_of(request)
            waiting = engine.waiting_tokens
            used = engine.kv_usage * engine.kv_tokens + waiting + taken_tokens
            found.append(self.weights["overlap"] * (waiting + tokens) + used)
        return found


WEIGHED: Mapping[str, type[Weighed]] = {"llm-d": LlmD, "dynamo": Dynamo}
"""By name."""


def parse_weights(router: str, words: Sequence[str]) -> dict[str, float]:
    """Of `NAME:WEIGHT` words. UserError with the names that the router has."""
    if words and router not in WEIGHED:
        raise UserError(f"--router-weights: {router} weighs nothing; take --router {' or '.join(WEIGHED)}")
    names = WEIGHED[router].shipped if words else ()
    try:
        return named_numbers(words, names, "WEIGHT", MOST_WEIGHT, may_be_zero=True)
    except ValueError as error:
        raise UserError(f"--router-weights: {error}") from None
