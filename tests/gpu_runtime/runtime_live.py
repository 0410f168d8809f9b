"""A small decoder served by the real clock's driver, and what a dense model would have said."""

import msgspec
import torch
from runtime_small import SMALL, Runner

from gpu_runtime.device import TorchDevice
from gpu_runtime.driver import LiveInstance
from gpu_runtime.model.decoder import Decoder, greedy
from kvtwin.testing import DECODE, PREFILL, CheckedEngine
from sim.clock.arrivals import Arrivals
from sim.cost.forms import LinearCost
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment, Limits
from sim.specs.hardware import load_hardware
from sim.specs.models import ModelSpec, load_model
from sim.systems.base import Policy
from sim.systems.layerkv import LayerKV
from traces.request import Request

DECODER = Decoder.random(SMALL, device="cpu", dtype=torch.float32, seed=3)


def spec(layers: int = SMALL.num_layers) -> ModelSpec:
    return msgspec.structs.replace(load_model("llama-2-7b"), name="small", num_layers=layers)


def prompt_of(request: Request) -> list[int]:
    """Token ids that depend on nothing but the request's number."""
    generator = torch.Generator().manual_seed(request.request_id)
    return torch.randint(0, SMALL.vocab_size, (request.prompt_tokens,), generator=generator).tolist()


class Served:
    """What a live run left: tokens by request, how each ended, and the counters."""

    def __init__(
        self, policy: Policy, arrivals: list[Request], limits: Limits, decoder: Decoder = DECODER, *, inline=False
    ):
        model = spec()
        cost = LinearCost(PREFILL, DECODE, 3e-4, limits.block_bytes, limits.block_bytes / limits.block_size / 4)
        scheduler = policy.scheduler(limits, GapCollector(), Deployment(model, load_hardware("a100-80g"), 1, cost))
        self.ended = []
        engine = CheckedEngine(scheduler, policy.length_predictor(0), self.ended.append)
        self.tokens: dict[int, list[int]] = {}
        self.device = TorchDevice(
            decoder,
            scheduler,
            limits,
            layer_group=1 if isinstance(policy, LayerKV) else SMALL.num_layers,
            prompt_of=prompt_of,
            device="cpu",
            dtype=torch.float32,
            on_token=lambda seq, token, _: self.tokens.setdefault(seq.request.request_id, []).append(token),
            scratch_blocks=4 * limits.num_cpu_blocks + 64,
            # As on CUDA, copies run beside: what may go wrong between threads shall be seen here.
            inline_copies=inline,
        )
        self.plans = []

        def observe(plan, start_s, times):
            self.device.check()
            self.plans.append((plan, start_s, times))

        self.instance = LiveInstance(engine, self.device, Arrivals(arrivals), observer=observe)
        self.device.start()
        with torch.inference_mode():
            self.instance.serve()
        self.counters = scheduler.counters
        assert scheduler.gpu.free == scheduler.gpu.num_blocks
        assert scheduler.host.free == scheduler.host.num_blocks


_KNOWN: dict[tuple[int, int, int], list[int]] = {}


def expected_tokens(request: Request) -> list[int]:
    """Greedy continuation computed alone, every step from scratch."""
    key = (request.request_id, request.prompt_tokens, request.output_tokens)
    if key not in _KNOWN:
        runner = Runner(DECODER, layer_group=SMALL.num_layers, num_blocks=200)
        with torch.inference_mode():
            logits = runner.step({0: prompt_of(request)})[0]
            found = [int(greedy(logits[-1:])[0])]
            while len(found) < request.output_tokens:
                found.append(int(greedy(runner.step({0: found[-1:]})[0][-1:])[0]))
        _KNOWN[key] = found
    return _KNOWN[key]
