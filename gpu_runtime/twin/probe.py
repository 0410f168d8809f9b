"""How fast the machine is now, by what its profile says: the same few iterations simulated and executed.

Clocks, temperature and neighbours change a machine by tens of per cent within minutes. A twin that disagrees on a
machine that has changed since its calibration says nothing about the simulator.
"""

from dataclasses import replace
from math import inf

from gpu_runtime.live import LiveOptions, perform
from gpu_runtime.model.decoder import Decoder
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.simulate import build_run, execute_all
from sim.run.traffic import traffic
from sim.systems.vllm055 import VllmRecompute

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64, 33


def machine_slowness(scenario: Scenario, decoder: Decoder, options: LiveOptions) -> float:
    """Seconds that a short fixed workload takes on this machine over what the scenario's profile says."""
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    block_size = scenario.block_size or VllmRecompute.default_block_size
    blocks = PROMPTS * -(-length // block_size) + PROMPTS
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
    simulated = execute_all(build_run(setup, traffic(short)))
    live = perform(setup, traffic(short), None, Recording(), decoder, options)
    if live.interrupted:
        raise KeyboardInterrupt
    return live.log.duration_s / simulated.log.duration_s


class Probe:
    """The machine's slowness around live runs.

    Attributes:
        slowness: before and after each run that counts.
        disturbed: runs that do not count.
    """

    slowness: list[float]
    disturbed: int

    def __init__(self, scenario: Scenario, decoder: Decoder, options: LiveOptions, max_drift: float | None) -> None:
        """A run counts if before and after it the machine is within `max_drift` of the profile; None: always."""
        self._of, self.max_drift = (scenario, decoder, options), max_drift
        # The first one pays for lazy set-up: it does not count.
        machine_slowness(*self._of)

    def begin(self) -> None:
        """Probe before a series of live runs; what was seen before is forgotten."""
        self.slowness, self.disturbed = [], 0
        self._last = machine_slowness(*self._of)

    def counts(self) -> bool:
        """Probe after a live run: whether it counts."""
        around = [self._last, machine_slowness(*self._of)]
        self._last = around[1]
        if self.max_drift is not None and any(abs(slowness - 1) > self.max_drift for slowness in around):
            self.disturbed += 1
            return False
        self.slowness += around
        return True
