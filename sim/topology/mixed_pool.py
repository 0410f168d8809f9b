"""`MixedPools`: Splitwise's cluster scheduler. Machines of either pool turn mixed under pressure, and return when idle.

Patel et al., "Splitwise", ISCA 2024, after its public simulator (splitwise-sim, `MixedPoolScheduler`). A prompt goes to
the machine of the prompt pool with the fewest prompt tokens pending, unless that has some and would have more than
`max_pending_tokens`; then to one of the mixed pool by the same rule; then a machine of the token pool turns mixed. Its
tokens go to the machine of the token pool with the least memory taken, if they fit; then to one of the mixed pool; then
a machine of the prompt pool turns mixed. Without any, one machine does both, that with the fewest tokens pending.
"""

from collections.abc import Callable, Sequence

from sim.topology.routers import EngineView, Router
from traces.request import Request


class MixedPools(Router):
    """Chooses the machine for a prompt, and notes in `targets` where its tokens go.

    Args:
        num_prompt: machines of the prompt pool; they come first.
        capacity_tokens: KV that each machine has room for.
        on_move: hears of machines that turn mixed.
    """

    def __init__(
        self,
        num_prompt: int,
        capacity_tokens: Sequence[int],
        max_pending_tokens: int,
        on_move: Callable[[int], None],
    ) -> None:
        self.num_prompt, self.capacity_tokens = num_prompt, capacity_tokens
        self.max_pending_tokens, self.on_move = max_pending_tokens, on_move
        self.mixed: list[int] = []
        """Places of machines that do both."""
        self.targets: dict[int, int] = {}
        """Request id -> place of the machine that its tokens come from."""
        self._coming = [0] * len(capacity_tokens)
        self._expected: dict[int, tuple[int, int]] = {}

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        self.mixed = [place for place in self.mixed if engines[place].num_in_flight or self._coming[place]]
        prompts = [place for place in range(self.num_prompt) if place not in self.mixed]
        tokens = [place for place in range(self.num_prompt, len(engines)) if place not in self.mixed]

        def pending(place: int) -> int:
            return engines[place].waiting_tokens

        def taken(place: int) -> int:
            return engines[place].tokens_in_flight + self._coming[place]

        def is_long(place: int) -> bool:
            return pending(place) > 0 and pending(place) + request.prompt_tokens > self.max_pending_tokens

        def is_full(place: int) -> bool:
            return taken(place) + request.prompt_tokens >= self.capacity_tokens[place]

        best = [min(pool, key=pending) for pool in (prompts, self.mixed) if pool]
        computes = next((place for place in best if not is_long(place)), None)
        best = [min(pool, key=taken) for pool in (tokens, self.mixed) if pool]
        decodes = next((place for place in best if not is_full(place)), None)
        if computes is None and tokens:
            computes = min(tokens, key=pending)
            self._turn_mixed(computes)
        if decodes is None and prompts:
            decodes = min(prompts, key=taken)
            self._turn_mixed(decodes)
        if computes is None or decodes is None:
            computes = decodes = min(range(len(engines)), key=pending)
        self.targets[request.request_id] = decodes
        if computes != decodes:
            self._coming[decodes] += request.prompt_tokens
            self._expected[request.request_id] = decodes, request.prompt_tokens
        return computes

    def _turn_mixed(self, place: int) -> None:
        if place not in self.mixed:
            self.mixed.append(place)
            self.on_move(place)

    def arrived(self, request: Request) -> None:
        """The machine that is to decode `request` knows of it, or there is nothing to decode."""
        place, tokens = self._expected.pop(request.request_id, (0, 0))
        self._coming[place] -= tokens

    def ended(self, request: Request) -> None:
        """`request` ended."""
        self.arrived(request)
        self.targets.pop(request.request_id, None)
