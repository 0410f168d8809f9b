"""`Conditional`: which prompts are prefilled where they decode, and which elsewhere."""

from collections.abc import Sequence

from sim.topology.routers import EngineView, Router
from traces.request import Request


class Conditional(Router):
    """Prompts of which the engine that would decode has cached all but a few tokens go there, the others to prefill.

    Dynamo's disaggregation router and llm-d's decider compare tokens that are not cached with a threshold so.

    Args:
        most_tokens: that an engine that decodes computes of a prompt.
        num_prefill: engines that prefill; they come first.
        prefill, decode: choose among them.
        caching: whether engines that decode keep prefixes.
    """

    def __init__(self, most_tokens: int, num_prefill: int, prefill: Router, decode: Router, *, caching: bool) -> None:
        self.most_tokens, self.num_prefill, self.prefill, self.decode = most_tokens, num_prefill, prefill, decode
        self.sees_kv = caching or prefill.sees_kv

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        split = self.num_prefill
        place = split + self.decode.route(request, engines[split:])
        if engines[place].prompt_tokens_of(request)[0] <= self.most_tokens:
            return place
        return self.prefill.route(request, engines[:split])
