"""Autoscalers: how many replicas there are to be, asked at fixed intervals, from the views that routers have.

`Hpa` is Kubernetes' HorizontalPodAutoscaler (autoscaling/v2, its documented algorithm and defaults). `DynamoPlanner` is
the load-based mode of NVIDIA Dynamo's planner for engines that prefill and decode ("Planner Design", aggregated mode):
one replica more where all are above the load that keeps an SLO, one less where one fewer would do. Its regression of
latency on load is replaced by the prices that it would learn.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal, Protocol

from sim.errors import UserError
from sim.named_options import number, read_named
from sim.topology.routers import EngineView

MOST = 1e5
"""Of any option."""


class Autoscaler(Protocol):
    """Says how many replicas there are to be."""

    def desired(self, now_s: float, ready: Sequence[EngineView], num_starting: int) -> int:
        """Replicas from `now_s` on; asked at each interval, with those that serve and how many are on their way."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """What every rule is told. `min` and `max` are replicas, and `start_s` is what one takes to start (None: worked out
    of its weights)."""

    min: int = number(MOST, 1, least=1)
    max: int = number(MOST, least=1)
    start_s: float | None = number(MOST, None)
    interval_s: float


@dataclass(frozen=True, kw_only=True)
class HpaOptions(ScalingOptions):
    """Of `Hpa`: a metric's target for each replica, and windows whose recommendations count."""

    metric: Literal["in-flight", "waiting"] = "in-flight"
    target: float = number(MOST, above=True)
    tolerance: float = number(MOST, 0.1)
    up_window_s: float = number(MOST, 0.0)
    down_window_s: float = number(MOST, 300.0)
    interval_s: float = number(MOST, 15.0, above=True)


@dataclass(frozen=True, kw_only=True)
class DynamoOptions(ScalingOptions):
    """Of `DynamoPlanner`: SLOs, and how readily it scales down (0: never, 100: as soon as one fewer would do)."""

    ttft_ms: float = number(MOST, 500.0, above=True)
    itl_ms: float = number(MOST, 50.0, above=True)
    sensitivity: float = number(MOST, 80.0)
    interval_s: float = number(MOST, 5.0, above=True)


RULES: dict[str, type[ScalingOptions]] = {"hpa": HpaOptions, "dynamo": DynamoOptions}
"""Name of a rule in `--autoscale`: its options."""
START_S, WEIGHTS_BYTES_PER_S = 60.0, 2e9
"""Start of a replica where none is said (assumptions): an engine's own, graphs and warm-up, and each GPU's weights."""


def parse_autoscale(text: str) -> ScalingOptions:
    """The options of `RULE:option=value,...`. UserError where there is no such rule or option, or a value is none."""
    found = read_named("--autoscale", "rule", text, RULES)
    if found.max < max(2, found.min):
        raise UserError(f"--autoscale {text}: max={found.max} is less than {max(2, found.min)}; raise it")
    return found


class Hpa:
    """desired = ceil(ready * ratio), ratio = mean metric / target; none within the tolerance.

    Replicas that start count as idle where the ratio says up, and not at all where it says down. Up it takes the least
    recommendation of its window, and at most doubles or adds four; down it takes the greatest of its own.
    """

    def __init__(self, options: HpaOptions) -> None:
        self.options = options
        self._recommended: deque[tuple[float, int]] = deque()

    def desired(self, now_s: float, ready: Sequence[EngineView], num_starting: int) -> int:
        options, current = self.options, len(ready) + num_starting
        found = min(max(self._recommendation(ready, num_starting), options.min), options.max)
        recommended = self._recommended
        recommended.append((now_s, found))
        longest_s = max(options.up_window_s, options.down_window_s)
        while recommended[0][0] < now_s - longest_s:
            recommended.popleft()
        up = min(number for at_s, number in recommended if at_s >= now_s - options.up_window_s)
        down = max(number for at_s, number in recommended if at_s >= now_s - options.down_window_s)
        if up > current:
            return min(up, max(2 * current, current + 4))
        return min(down, current)

    def _recommendation(self, ready: Sequence[EngineView], num_starting: int) -> int:
        options, current = self.options, len(ready) + num_starting
        if options.metric == "waiting":
            total = sum(view.num_waiting for view in ready)
        else:
            total = sum(view.num_in_flight for view in ready)
        ratio = total / (len(ready) * options.target)
        counted = len(ready)
        if ratio > 1.0 and num_starting:
            counted = current
            ratio = total / (current * options.target)
            if ratio < 1.0:
                return current
        if abs(ratio - 1.0) <= options.tolerance:
            return current
        return ceil(ratio * counted - 1e-9)


class DynamoPlanner:
    """One replica more where the load of all is beyond what keeps TTFT or ITL, one less where it is below
    (n - 1) / n * sensitivity of both; nothing while a replica starts.

    Args:
        prefill_s: of so many prompt tokens.
        decode_s: of an iteration of so many sequences with so many tokens of context.
    """

    def __init__(
        self, options: DynamoOptions, prefill_s: Callable[[float], float], decode_s: Callable[[int, float], float]
    ) -> None:
        self.options, self._prefill_s, self._decode_s = options, prefill_s, decode_s

    def desired(self, now_s: float, ready: Sequence[EngineView], num_starting: int) -> int:
        options, current = self.options, len(ready) + num_starting
        if num_starting:
            return current
        prefills = [self._prefill_s(view.waiting_tokens) / (options.ttft_ms * 1e-3) for view in ready]
        decodes = [self._decode_share(view) for view in ready]
        if min(prefills) > 1.0 or min(decodes) > 1.0:
            return min(current + 1, options.max)
        share = (current - 1) / current * options.sensitivity / 100
        if max(prefills) < share and max(decodes) < share:
            return max(current - 1, options.min)
        return current

    def _decode_share(self, view: EngineView) -> float:
        """Sequences in flight over the most that decode in time with contexts as long."""
        number = view.num_in_flight
        if not number:
            return 0.0
        context = view.tokens_in_flight / number
        target_s = self.options.itl_ms * 1e-3
        if self._decode_s(1, context) > target_s:
            return inf
        low, high = 1, 2
        while self._decode_s(high, high * context) <= target_s and high < MOST:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self._decode_s(middle, middle * context) <= target_s:
                low = middle
            else:
                high = middle
        return number / low
