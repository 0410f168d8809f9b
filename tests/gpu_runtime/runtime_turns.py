"""Turns of conversations, each sent when the one before has been answered, on a device."""

from typing import NamedTuple

import torch

from gpu_runtime.device import TorchDevice
from gpu_runtime.instance import LiveInstance
from gpu_runtime.tokens.trace_prompts import TracePrompts
from kvtwin.testing import live
from kvtwin.testing.engines import build_engine, linear_machine
from kvtwin.testing.live import SMALL, continuation
from sim.clock.closed_loop import ClosedLoop
from sim.engine.engine import Engine
from sim.engine.limits import Limits
from sim.engine.sequence import Sequence
from sim.systems.base import Policy
from traces.request import Request


class Conversation(NamedTuple):
    """What was asked and said, by request."""

    engine: Engine
    device: TorchDevice
    ended: list[Sequence]
    asked: dict[int, list[int]]
    said: dict[int, list[int]]


def converse(policy: Policy, limit: Limits, turns: list[Request]) -> Conversation:
    """Serve the turns; answers must be those of each prompt alone, and nothing may stay held."""
    prompts, ended, asked, said = TracePrompts(SMALL.vocab_size, 0), [], {}, {}
    engine = build_engine(policy, limit, linear_machine(limit.block_bytes, layers=SMALL.num_layers), ended.append)

    def hear(seq: Sequence, token: int, time_s: float) -> None:
        said.setdefault(seq.request.request_id, []).append(token)
        prompts.hear(seq, token, time_s)

    def prompt_of(request: Request) -> list[int]:
        asked[request.request_id] = list(prompts(request))
        return asked[request.request_id]

    device = live.build_device(engine.scheduler, prompt_of=prompt_of, on_token=hear)
    loop = ClosedLoop(turns, by_session=True)
    device.start()
    with torch.inference_mode():
        LiveInstance(engine, device, loop, ended=loop.ended).serve()
    device.close()
    live.check_nothing_held(device)
    for request in turns:
        prompt, answer = tuple(asked[request.request_id]), tuple(said[request.request_id])
        assert answer == continuation(prompt, request.output_tokens, guess=answer)
    return Conversation(engine, device, ended, asked, said)
