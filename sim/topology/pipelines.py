"""Routing to pipelines: the router chooses an engine, and within it the virtual engine with the fewest in flight."""

from collections.abc import Sequence

from sim.topology.routers import EngineView, Router
from traces.request import Request


class Together:
    """Views of an engine's virtual engines as one."""

    def __init__(self, engines: Sequence[EngineView]) -> None:
        self.engines = engines

    @property
    def num_in_flight(self) -> int:
        """Requests sent to any of them that have not ended."""
        return sum(engine.num_in_flight for engine in self.engines)

    @property
    def tokens_in_flight(self) -> int:
        """Their prompts' tokens."""
        return sum(engine.tokens_in_flight for engine in self.engines)

    @property
    def num_waiting(self) -> int:
        """Those of them that wait for their prefill."""
        return sum(engine.num_waiting for engine in self.engines)

    @property
    def running_until_s(self) -> float:
        """When the last of the iterations under way ends, s; 0 where there is none."""
        return max(engine.running_until_s for engine in self.engines)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return sum(engine.waiting_tokens for engine in self.engines)

    @property
    def kv_tokens(self) -> int:
        """Tokens for which their KV blocks have room."""
        return sum(engine.kv_tokens for engine in self.engines)

    @property
    def kv_usage(self) -> float:
        """Mean share of these that sequences hold."""
        return sum(engine.kv_usage for engine in self.engines) / len(self.engines)

    def prompt_tokens_of(self, request: Request) -> tuple[int, int]:
        """Tokens of a prompt that are not cached, and those of blocks it would take, in the one that would get it."""
        return min(self.engines, key=lambda engine: engine.num_in_flight).prompt_tokens_of(request)


class ToPipelines(Router):
    """vLLM 0.5.5's choice within an engine, `router`'s between engines of `stages` virtual engines each."""

    def __init__(self, router: Router, stages: int) -> None:
        self.router, self.stages, self.sees_kv = router, stages, router.sees_kv

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        stages = self.stages
        found = [Together(engines[first : first + stages]) for first in range(0, len(engines), stages)]
        chosen = self.router.route(request, found)
        loads = [engine.num_in_flight for engine in found[chosen].engines]
        return chosen * stages + loads.index(min(loads))


def to_pipelines(router: Router, stages: int) -> Router:
    """`router` itself where engines have one stage."""
    return ToPipelines(router, stages) if stages > 1 else router
