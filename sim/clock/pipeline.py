"""`Pipeline`: an engine whose layers lie on several groups of GPUs, its stages, with as many batches in flight.

Each batch is a `VirtualEngine` (vLLM 0.5's word): a scheduler with its share of the blocks, whose iterations pass
through all stages. One loop on the host launches them all. An iteration takes

    host + (computation - host) + (stages - 1) x hand-over,

an equal part of the computation at each stage, and waits at a stage that another batch is in.
"""

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Any

from sim.clock.arrivals import TIE_S
from sim.clock.member import Member
from sim.cost.lanes import Lane
from sim.cost.model import CostModel
from sim.cost.pricing import Pricer
from sim.engine.plan import IterationPlan, StepTimes


def pass_stages(
    lanes: Iterable[Lane], ready_s: float, stages_s: Iterable[float], hand_over_s: float, label: str
) -> float:
    """Occupy each stage's lane for its seconds, one after the other; returns when the last is left, s."""
    end_s, before_s = ready_s, 0.0
    for lane, stage_s in zip(lanes, stages_s, strict=True):
        end_s = lane.reserve(end_s + before_s, stage_s, label)
        before_s = hand_over_s
    return end_s


class Stages:
    """Stages that the batches of a queue pass, one after the other."""

    def __init__(self, lanes: list[Lane]) -> None:
        self.lanes = lanes
        self._left_s = deque([0.0] * len(lanes), maxlen=len(lanes))
        """When the last batches left the last stage, s."""

    def take_in(
        self, ready_s: float, stages_s: Iterable[float], hand_over_s: float, label: str, *, ahead: bool
    ) -> tuple[float, float]:
        """When a batch that is `ready_s` enters the first stage and leaves the last, s.

        `ahead`: it waits for the batch of as many steps before, whose tokens are what it feeds.
        """
        if ahead:
            ready_s = max(ready_s, self._left_s[0])
        began_s = max(ready_s, self.lanes[0].free_s)
        end_s = pass_stages(self.lanes, ready_s, stages_s, hand_over_s, label)
        self._left_s.append(end_s)
        return began_s, end_s

    def skip(self, now_s: float) -> None:
        """A batch without work has its turn."""
        self._left_s.append(now_s)


class Pipeline:
    """The stages and the host's loop, which some virtual engines share.

    Args:
        cost: of whole iterations.
        stages: how many.
        hand_over_s_per_token: what a token's activations take from one to the next, s.
    """

    def __init__(self, cost: CostModel, stages: int, hand_over_s_per_token: float) -> None:
        self.cost, self.stages, self.hand_over_s_per_token = cost, stages, hand_over_s_per_token
        self.engines: list[VirtualEngine] = []
        self.lanes: list[Lane] = []
        """The stages' GPUs."""
        self.host_free_s = 0.0
        """Until when the loop launches or waits for what it was last asked to, s."""

    def pass_through(self, plan: IterationPlan, ready_s: float) -> float:
        """Occupy the host and each stage with an iteration, from `ready_s` on; returns when it leaves the last, s."""
        whole_s, host_s = self.cost.iteration_s(plan), self.cost.prelude_s(plan)
        if not whole_s:
            # It only pulls.
            return ready_s
        stage_s = (whole_s - host_s) / self.stages
        host_s += self.cost.added_host_s(plan.num_decodes + len(plan.chunks))
        self.host_free_s = max(ready_s, self.host_free_s) + host_s
        hand_over_s = self.hand_over_s_per_token * plan.num_tokens
        return pass_stages(self.lanes, self.host_free_s, [stage_s] * self.stages, hand_over_s, plan.kind)

    def next_place(self, at_s: float) -> int:
        """Place of the virtual engine that DistServe's loop turns to next after `at_s`.

        Having launched one, the loop passes over those that have nothing to do and waits for the one launched first.
        So one that is idle gets a turn only while another is launched, or when all are idle.
        """

        def turn(engine: "VirtualEngine") -> tuple[float, bool]:
            if engine.end_s < inf:
                return max(engine.end_s, self.host_free_s), False
            return (self.host_free_s if at_s < self.host_free_s - TIE_S else inf), True

        return min(self.engines, key=turn).place


class StagePricer(Pricer):
    """Prices plans of a virtual engine. What is copied before the computation, each stage copies of its own layers."""

    pipeline: Pipeline

    def step(self, plan: IterationPlan, now_s: float) -> StepTimes:
        start_s = self._before(plan, now_s) if plan.has_swaps else now_s
        end_s = self.pipeline.pass_through(plan, start_s)
        return StepTimes(1, end_s, 0.0, 0.0, end_s, 1)


class VirtualEngine(Member):
    """One of the batches in flight; its compute lane is that of the stage of its own number.

    Their iterations depend on one another's, so that none is jumped.
    """

    def __init__(self, *args: Any, pipeline: Pipeline, place: int, layers: int, **options: Any) -> None:  # noqa: ANN401
        """As `Member`, at `place` of the cluster; `layers` of the model."""
        self.pipeline, self.place = pipeline, place
        options["jump"] = False
        super().__init__(*args, layers=layers // pipeline.stages, pricer=StagePricer, **options)
        assert isinstance(self.pricer, StagePricer)
        self.pricer.pipeline = pipeline
        pipeline.engines.append(self)
        pipeline.lanes.append(self.lanes.compute)

    @property
    def busy_until_s(self) -> float:
        return self.pipeline.host_free_s

    @busy_until_s.setter
    def busy_until_s(self, at_s: float) -> None:
        self.pipeline.host_free_s = max(self.pipeline.host_free_s, at_s)

    def drained_s(self, now_s: float) -> float:
        return max(now_s, *(lane.free_s for lane in self.pipeline.lanes))
