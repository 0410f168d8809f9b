"""`Host`: what an engine's own processes do for an iteration, before the GPU's work or behind that of the one before.

Serial: schedule, prepare, compute, take the tokens, one after the other; an iteration lasts host + GPU. Hidden: the
host of iteration k+1 begins when the GPU begins k, so the GPU begins

    begin(k+1) = max(begin(k) + host, begin(k) + gpu(k))

and iterations that follow one another last max(host, GPU). Where nothing runs there is nothing to hide behind.
"""

from math import ceil, inf
from typing import Final

from sim.cost.lanes import Lane
from sim.cost.model import run_s, steps_until
from sim.engine.plan import StepTimes

TIE_S: Final = 1e-9
"""An iteration decided this close to the end of the one before follows it at once."""


class Host:
    """Host time of an iteration: `base_s` + `s_per_sequence` for each of its sequences, s."""

    __slots__ = ("base_s", "hidden", "s_per_sequence")

    def __init__(self, base_s: float, s_per_sequence: float, hidden: bool) -> None:
        self.base_s, self.s_per_sequence, self.hidden = base_s, s_per_sequence, hidden

    def seconds(self, num_sequences: int) -> float:
        """Of an iteration of so many sequences, s."""
        return self.base_s + self.s_per_sequence * num_sequences

    def added_s(self, num_sequences: int) -> float:
        """What of it an iteration lasts longer for sure, s."""
        return 0.0 if self.hidden else self.seconds(num_sequences)


class HiddenRun:
    """Iterations of one batch whose host time is hidden; seconds from when the first was decided.

    The GPU begins the first after `wait_s` and takes `gpu_s` for it, `slope_s` more for each further one. The second
    ends `second_s` after the first, each further one takes `growth_s` more than the one before.
    """

    __slots__ = ("gpu_s", "growth_s", "host_s", "second_s", "slope_s", "steps", "wait_s")

    def __init__(self, wait_s: float, gpu_s: float, slope_s: float, host_s: float, steps: int) -> None:
        """Up to `steps` iterations; they end at a breakpoint of their durations.

        While the GPU takes less than the host, begins are `host_s` apart and each end follows its begin by the GPU's
        time: ends are host + slope apart.
        """
        self.wait_s, self.gpu_s, self.slope_s, self.host_s = wait_s, gpu_s, slope_s, host_s
        self.second_s, self.growth_s = gpu_s + slope_s, slope_s
        if gpu_s < host_s:
            self.second_s, self.growth_s = host_s + slope_s, 0.0
            if slope_s > 0.0:
                steps = min(steps, ceil((host_s - gpu_s) / slope_s) + 1)
        self.steps = steps

    def end_by(self, target_s: float, *, ahead: bool) -> None:
        """End with the first end at or after `target_s`; `ahead`: with the last that is scheduled before then.

        Scheduled ahead, an iteration is so when the GPU begins the one before.
        """
        if self.steps > 1:
            self.steps = min(self.steps, self._needed(target_s, ahead))

    def _needed(self, target_s: float, ahead: bool) -> int:
        most = self.steps
        if ahead and target_s <= self.wait_s:
            return 1
        if ahead and self.gpu_s < self.host_s:
            return 1 + steps_until(target_s - self.wait_s, self.host_s, 0.0, most)
        left_s = target_s - self.first_end_s
        ended = 1 if left_s <= 0.0 else 1 + steps_until(left_s, self.second_s, self.growth_s, most)
        # Where the GPU takes longer, one begins as the one before ends.
        return ended + 1 if ahead else ended

    @property
    def first_end_s(self) -> float:
        """End of the first."""
        return self.wait_s + self.gpu_s

    @property
    def end_s(self) -> float:
        """End of the last."""
        return self.first_end_s + run_s(self.second_s, self.growth_s, self.steps - 1)

    @property
    def last_gpu_s(self) -> float:
        """The GPU's part of the last."""
        return self.gpu_s + self.slope_s * (self.steps - 1)

    @property
    def busy_s(self) -> float:
        """The GPU's part of all."""
        return run_s(self.gpu_s, self.slope_s, self.steps)


def after_host_s(host: Host, num_sequences: int, now_s: float, lane: Lane, device: Lane) -> float:
    """When the device may begin an iteration decided at `now_s`: its host time over, s.

    Hidden host time begins with the device's work on the iteration before, if this one follows it at once; the host's
    lane is free from then on, the device's from the end of its work.
    """
    if not num_sequences:
        return now_s
    seconds = host.base_s + host.s_per_sequence * num_sequences
    follows = host.hidden and now_s <= device.free_s + TIE_S
    start_s = (lane.free_s if follows else now_s) + seconds
    if start_s < now_s:
        start_s = now_s
    if lane.intervals is None:
        lane.busy_s += seconds
    else:
        lane.run(start_s - seconds, seconds, "host")
    lane.free_s = start_s
    return start_s


def run_beside_host(
    host: Host,
    num_decodes: int,
    gpu_s: float,
    slope_s: float,
    steps: int,
    now_s: float,
    until_s: float,
    lane: Lane,
    device: Lane,
    *,
    ahead: bool,
) -> StepTimes:
    """Price up to `steps` like decode iterations whose host time is hidden, as `Pricer.run` does."""
    start_s = after_host_s(host, num_decodes, now_s, lane, device)
    host_s = host.seconds(num_decodes)
    run = HiddenRun(start_s - now_s, gpu_s, slope_s, host_s, steps)
    if until_s < inf:
        run.end_by(until_s - now_s, ahead=ahead)
    end_s = now_s + run.end_s
    last_s = end_s - run.last_gpu_s
    device.run(start_s, end_s - start_s, "decode", run.busy_s)
    lane.run(start_s, last_s - start_s, "host", host_s * (run.steps - 1))
    lane.free_s, device.free_s = last_s, end_s
    return StepTimes(run.steps, now_s + run.first_end_s, run.second_s, run.growth_s, end_s, run.steps)
