"""`AsyncScheduling`: the option of all whose batches vLLM v1 makes."""

from sim.frozen import frozen
from sim.parts.options import CheckedOptions, vllm_option


@frozen
class AsyncScheduling(CheckedOptions):
    """Of `SchedulerConfig` in vLLM 0.33: whether steps are scheduled ahead."""

    async_scheduling: bool | None = vllm_option(
        None,
        "schedule an iteration while the one before it runs, its host time hidden (default: as vLLM 0.33, on; off on a "
        "CPU, with an --engine-profile whose host is serial, and where prices have no engine: forms linear and paper)",
    )
