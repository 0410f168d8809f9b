"""Small results made by hand, whose every field has a value until a test changes it, and small runs that make one."""

from dataclasses import replace

from msgspec import UNSET, structs

from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.options.values import flag
from sim.results.metrics import names
from sim.results.schema import Result
from sim.results.sections import Counts, LanesUse, LaneUse, ResolvedScenario, UsedProfile, Versions
from sim.run.prepare import prepare
from sim.run.runs import Recording, Run
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic


def flags(**options: object) -> list[str]:
    """Options as the command line's words: `num_prompts=60, quiet=True` as `--num-prompts 60 --quiet`."""
    found: list[str] = []
    for name, value in options.items():
        values = [] if value is True else value if isinstance(value, tuple) else (value,)
        found += [flag(name), *map(str, values)]
    return found


LATENCIES = ("ttft", "tpot", "e2el", "queue", "itl")
CROWDED = Scenario(
    workload="sharegpt", num_prompts=40, request_rate=20.0, num_gpu_blocks_override=120, num_cpu_blocks_override=60,
    max_model_len=1024, goodput=("ttft:3000",), seed=1,
)  # fmt: skip
"""More requests than the pools hold."""
NOTHING = Recording()
PROFILE = UsedProfile(name="l20-derived", status="derived", sha256="0123456789abcdef")


def lanes(compute: float = 0.0, h2d: float = 0.0, d2h: float = 0.0) -> LanesUse:
    return LanesUse(compute=LaneUse(busy_s=compute), h2d=LaneUse(busy_s=h2d), d2h=LaneUse(busy_s=d2h))


def counts(**policy: int) -> Counts:
    return Counts(
        swap_out_blocks=0, swap_in_blocks=0, swap_space_exhausted=0, prefix_hit_tokens=0, prefix_rehit_tokens=0,
        prefix_evicted_blocks=0, ignored={}, policy=policy,
    )  # fmt: skip


def scenario(**changes: object) -> ResolvedScenario:
    values = ResolvedScenario(
        workload="sharegpt", request_rate=6.0, gpu="l20", block_size=16, max_num_seqs=256, max_num_batched_tokens=4096,
        max_model_len=4096, enable_chunked_prefill=False, enable_prefix_caching=False,
        goodput=("ttft:3000", "tpot:200"), policy="vllm-recompute", policy_options={}, policy_parts={},
        num_gpu_blocks=3467, num_cpu_blocks=512, block_bytes=2**23,
    )  # fmt: skip
    return replace(values, **changes)


def small_result(**changes: object) -> Result:
    """A run of which no request completed, with these fields changed."""
    nothing = {name: None for latency in LATENCIES for name in names(latency)}
    values = Result(
        backend="kvtwin-sim", model_id="llama-2-7b", policy="vllm-recompute", num_prompts=0, request_rate=6.0,
        complete=True, error=UNSET, duration=0.0, completed=0, ignored=0, failed=0, total_input_tokens=0,
        total_output_tokens=0, request_throughput=0.0, output_throughput=0.0, total_token_throughput=0.0,
        max_concurrent_requests=0, request_goodput=None, goodput_attainment=None, **nothing, itl_percentiles="exact",
        makespan_s=0.0, num_iterations=0, num_preemptions=0, counters=counts(), lanes=lanes(), warnings=[],
        scenario=scenario(), profile=PROFILE, versions=Versions(kvtwin="0"),
    )  # fmt: skip
    return structs.replace(values, **changes)


def finished(policy: str, keep: Recording = NOTHING, options: Scenario = CROWDED) -> Run:
    """A simulated run that has ended."""
    return execute(build_run(prepare(options, policy, parse_policy(policy, {})[1]), traffic(options), keep=keep))
