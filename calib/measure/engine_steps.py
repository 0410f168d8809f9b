"""Whole iterations as the live runtime runs them, engine and all: from one decision to the next."""

from collections.abc import Callable
from itertools import pairwise, repeat
from math import inf

import msgspec

from calib.measure.lengths import drawn_lengths, spread_lengths
from calib.measure.model_points import BLOCK_TOKENS
from calib.measure.points import Point
from calib.samples import PIECES, WHOLE
from gpu_runtime.device import TorchDevice
from gpu_runtime.device_memory import DeviceMemory
from gpu_runtime.instance import LiveInstance
from gpu_runtime.model.capture_sizes import captured_size
from gpu_runtime.model.decoder import Decoder
from sim.cost.forms import build_cost
from sim.cost.profile import LINEAR_UNITS, linear_profile
from sim.engine.engine import Engine
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment, Limits
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.predictor import NoPredictor
from sim.specs.hardware import load_hardware
from sim.specs.model_spec import ModelSpec
from sim.systems.vllm055 import VllmRecompute
from traces.request import Request

WARM_UPS = 2
"""Iterations of each kind that do not count."""


class Waves:
    """An inbox that sends the next wave of requests once the engine has ended the one before."""

    def __init__(self, point: Point, waves: int, output_tokens: int) -> None:
        # Contexts differ as those of served requests do, which costs attention that pads them.
        self._lengths = repeat(spread_lengths(point)) if point.context_tokens else drawn_lengths(point, 0)
        self._left, self._output_tokens = waves, output_tokens
        self._sent = 0
        self.unfinished = 0

    @property
    def next_s(self) -> float:
        """Now, as long as there are waves."""
        return 0.0 if self._left else inf

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        """Hand over a wave if no request is served."""
        if self.unfinished or not self._left:
            return
        self._left -= 1
        for length in next(self._lengths):
            to(Request(self._sent, until_s, length, self._output_tokens))
            self._sent += 1
            self.unfinished += 1


def engine_steps(decoder: Decoder, spec: ModelSpec, point: Point, repeats: int) -> list[float]:
    """Seconds of `repeats` iterations of a point of op `step`, each from one decision of the engine to the next.

    Args:
        decoder: of the layers that `point.num_layers` says.
        spec: the model's shape.
        point: prompts computed whole, or decodes whose contexts grow by one token a repeat; `graph` says how much of
            them is replayed from graphs, as live runs do.
    """
    decodes = point.context_tokens > 0
    waves, output = (1, repeats + WARM_UPS + 2) if decodes else (repeats + WARM_UPS, 2)
    longest = max(spread_lengths(point)) + output if decodes else point.length + output
    blocks = point.batch_size * (-(-longest // BLOCK_TOKENS) + 1)
    budget = point.batch_size * (longest - output)
    model = msgspec.structs.replace(spec, num_layers=point.num_layers)
    limits = Limits(
        num_gpu_blocks=blocks + blocks // 50 + 2,
        num_cpu_blocks=1,
        block_size=BLOCK_TOKENS,
        block_bytes=1.0,
        max_model_len=longest,
        max_num_seqs=point.batch_size,
        max_num_batched_tokens=max(budget, longest),
    )
    # Nothing here predicts: any costs will do.
    profile = linear_profile("free", (0.0,) * len(LINEAR_UNITS), "nothing")
    cost = build_cost(model, load_hardware("cpu"), profile, 1, limits.block_bytes)
    deployment = Deployment(model, load_hardware("cpu"), 1, cost, profile)
    scheduler = VllmRecompute().scheduler(limits, GapCollector(), deployment)
    inbox = Waves(point, waves, output)

    def ended(_: object) -> None:
        inbox.unfinished -= 1

    starts: list[tuple[float, bool]] = []

    def observe(plan: IterationPlan, start_s: float, _: StepTimes) -> None:
        starts.append((start_s, bool(plan.chunks)))

    device = TorchDevice(
        DeviceMemory(decoder, scheduler, decoder.device, decoder.dtype),
        graph_batch_sizes=(point.batch_size,) if point.graph == WHOLE else (),
        piece_sizes=(captured_size(point.tokens + point.batch_size * point.draw),) if point.graph == PIECES else (),
        prompt_of=lambda request: [
            (7 * i + request.request_id) % spec.vocab_size for i in range(request.prompt_tokens)
        ],
    )
    try:
        device.warm_up()
        device.start()
        LiveInstance(Engine(scheduler, NoPredictor(), ended), device, inbox, observer=observe).serve()
    finally:
        device.close()
    lasted = [after - before for (before, is_prompt), (after, _) in pairwise(starts) if is_prompt != decodes]
    return lasted[WARM_UPS : WARM_UPS + repeats]
