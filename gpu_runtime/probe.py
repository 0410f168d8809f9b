"""How fast the machine is now, by what its profile says: the same few iterations simulated and executed.

Clocks, temperature and neighbours change a machine by tens of per cent within minutes. A twin that disagrees on a
machine that has changed since its calibration says nothing about the simulator.
"""

from dataclasses import replace
from math import inf

from gpu_runtime.decoder import Decoder
from gpu_runtime.live import LiveOptions, perform
from sim.policies.vllm import VllmRecompute
from sim.scenario import Scenario
from sim.simulate import Keep, build_run, execute, prepare, traffic

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64, 33


def machine_slowness(scenario: Scenario, decoder: Decoder, options: LiveOptions) -> float:
    """Seconds that a short fixed workload computes on this machine over what the scenario's profile says."""
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    blocks = PROMPTS * -(-length // scenario.block_size) + PROMPTS
    short = replace(
        scenario,
        trace=None,
        workload="fixed",
        num_prompts=PROMPTS,
        input_len=PROMPT_TOKENS,
        output_len=OUTPUT_TOKENS,
        request_rate=inf,
        clip=None,
        rate_scale=1.0,
        goodput=(),
        num_gpu_blocks_override=blocks,
        num_cpu_blocks_override=1,
        max_model_len=length,
        max_num_batched_tokens=None,
        max_num_seqs=PROMPTS,
        enable_chunked_prefill=False,
    )
    setup = prepare(short, "probe", VllmRecompute())
    simulated = execute(build_run(setup, traffic(short)))
    live = perform(setup, traffic(short), None, Keep(), decoder, options)
    return live.lanes.compute.busy_s / simulated.lanes.compute.busy_s


class Probe:
    """The machine's slowness before and after each live run."""

    def __init__(self, scenario: Scenario, decoder: Decoder, options: LiveOptions) -> None:
        self._of = scenario, decoder, options
        # The first one pays for lazy set-up.
        machine_slowness(*self._of)
        self.seen: list[float] = []

    def begin(self) -> None:
        """Probe before a series of live runs; what was seen before is forgotten."""
        self.seen = [machine_slowness(*self._of)]

    def drifts(self, max_drift: float | None) -> bool:
        """Probe after a live run: whether before or after it the machine was off the profile by more than that."""
        self.seen.append(machine_slowness(*self._of))
        return max_drift is not None and any(abs(slowness - 1) > max_drift for slowness in self.seen[-2:])
