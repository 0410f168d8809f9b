"""`Scenario`: everything that makes a run, as the CLI, a TOML file or a caller states it. Each field is a flag.

Flags are spelled as vLLM spells them where vLLM has one. `sim.policy_options` has the policies' own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, Literal, TypeVar

from sim.errors import UserError
from sim.option_values import convert, flag, option_fields
from traces.workloads import ABOUT, OPTIONS, WORKLOADS, option_help, takers

Options = TypeVar("Options")


def _flag(default: Any, help_text: str, metavar: str | None = None, alias: str | None = None) -> Any:  # noqa: ANN401
    """A dataclass default; `alias` is another name of the option, vLLM's own."""
    return field(default=default, metadata={"help": help_text, "metavar": metavar, "alias": alias})


@dataclass(frozen=True)
class Scenario:
    """Traffic, deployment, engine limits and what to measure. Units are in the names or in the help texts."""

    trace: str | None = _flag(
        None, "trace file to replay (Azure, Mooncake, BurstGPT, Vidur, ShareGPT, CSV ...)", "FILE"
    )
    trace_format: str | None = _flag(None, "format of --trace, where it cannot be told from the file", "NAME")
    time_unit: str | None = _flag(None, "unit of the trace's timestamps, where the format leaves it open", "UNIT")
    hash_block_tokens: int | None = _flag(
        None, "tokens of a block of the trace's hash ids (Mooncake: 512, Bailian: 16; --workload sessions: 16)", "N"
    )
    zero_tokens: Literal["error", "drop", "one"] | None = _flag(
        None, "rows of the trace with 0 prompt or output tokens: refuse (the default), drop, or read as 1 token"
    )
    tokenizer: str | None = _flag(
        None, "tokenizer.json for a trace of prompts in words, or bytes:4 to estimate their lengths", "PATH"
    )
    default_prompt_tokens: int | None = _flag(None, "length of the trace's prompts that have none", "N")
    default_output_tokens: int | None = _flag(None, "length of the trace's outputs that have none", "N")
    workload: str | None = _flag(None, f"generated traffic instead of a trace: {', '.join(WORKLOADS)}", "NAME")
    num_prompts: int | None = _flag(None, "requests to take (trace: all, workload: 1000)", "N")
    request_rate: float | None = _flag(None, "requests/s; with --trace replaces its arrival times", "R")
    burstiness: float = _flag(1.0, "gamma shape of the arrivals of --request-rate; 1 is Poisson, less is burstier", "B")
    rate_scale: float = _flag(1.0, "speed the arrivals up by this factor", "X")
    clip: int | None = _flag(
        None, "cut requests to this context length: output up to half of it, then the prompt", "TOKENS"
    )
    input_len: int | None = _flag(None, "prompt tokens of the workload: of each request, or their mean", "N")
    output_len: int | None = _flag(None, "output tokens of the workload, likewise", "N")
    range_ratio: float | None = _flag(None, option_help("range_ratio"), "X")
    end_rate: float | None = _flag(None, option_help("end_rate"), "R")
    burst_factor: float | None = _flag(None, option_help("burst_factor"), "X")
    burst_period: float | None = _flag(None, option_help("burst_period"), "S")
    burst_duration: float | None = _flag(None, option_help("burst_duration"), "S")
    turns: float | None = _flag(None, option_help("turns"), "X")
    think_time: float | None = _flag(None, option_help("think_time"), "S")
    shared_prefix: int | None = _flag(None, option_help("shared_prefix"), "N")
    prefix_groups: int | None = _flag(None, option_help("prefix_groups"), "N")
    max_context: int | None = _flag(None, option_help("max_context"), "N")
    max_concurrency: int | None = _flag(
        None, "most requests in flight: the next is sent when one ends, or at its arrival if that is later", "N"
    )
    closed_sessions: bool = _flag(
        False, "a session's next turn waits for the last answer, then for the trace's gap between the two"
    )
    seed: int = _flag(0, "seed of everything random", "N")

    model: str = _flag("llama-2-7b", "built-in model name, or a Hugging Face config.json", "M")
    dtype: Literal["auto", "half", "float16", "bfloat16", "float32"] = _flag(
        "auto", "of weights and KV cache (auto: the model's, 16 bits unless it is quantised)"
    )
    quantization: Literal["fp8", "modelopt_fp4"] | None = _flag(
        None,
        "of all layers' weights and of their products' inputs, as if the checkpoint were so; modelopt_fp4 is NVFP4 "
        "(default: as the model's config.json says; awq, gptq, compressed-tensors and others are read from there)",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4"] = _flag(
        "auto", "of the KV cache (auto: the model's); int8 and int4 have a scale and a zero point per 64 elements"
    )
    gpu: str = _flag("a100-80g", "GPU name", "G")
    tp: int = _flag(1, "GPUs in the tensor-parallel group", "N", alias="tensor_parallel_size")
    pipeline_parallel_size: int | None = _flag(
        None, "stages that the layers of an engine lie on, each of --tp GPUs, with as many batches in flight", "N"
    )
    replicas: int | None = _flag(None, "engines behind --router, each with its own GPUs (default: 1)", "N")
    router: Literal["round-robin", "least-loaded", "power-of-two", "session-affinity", "prefix-affinity"] | None = (
        _flag(None, "who of several engines gets a request (default: round-robin)")
    )
    prefill_replicas: int | None = _flag(
        None, "engines that only prefill and hand over to --decode-replicas; for policies that can (distserve)", "N"
    )
    decode_replicas: int | None = _flag(None, "engines that only decode what others prefilled", "N")
    link_gbps: float | None = _flag(
        None, "link of each engine to others, Gbit/s (gigabits, as networks are sold) in each direction", "GBPS"
    )
    prefill_tp: int | None = _flag(None, "GPUs in the group of an engine that prefills (default: --tp)", "N")
    decode_tp: int | None = _flag(None, "the same of an engine that decodes", "N")
    prefill_pipeline_parallel_size: int | None = _flag(
        None, "stages of an engine that prefills (default: --pipeline-parallel-size)", "N"
    )
    decode_pipeline_parallel_size: int | None = _flag(None, "the same of an engine that decodes", "N")
    prefill_gpu: str | None = _flag(None, "GPU of the engines that prefill (default: --gpu)", "G")
    decode_gpu: str | None = _flag(None, "GPU of the engines that decode", "G")
    prefill_profile: str | None = _flag(None, "constants of the engines that prefill (default: --profile)", "NAME|FILE")
    decode_profile: str | None = _flag(None, "constants of the engines that decode", "NAME|FILE")
    profile: str | None = _flag(None, "fitted constants: a shipped profile or a file (default: the GPU's)", "NAME|FILE")
    engine_profile: str | None = _flag(
        None,
        "host time and CUDA graphs of the engine: vllm-0.5, vllm-v1, vllm-v1-async, kvtwin or a file (default: "
        "the policy's; prices of the forms linear and paper are all there is)",
        "NAME|FILE",
    )
    cost_form: Literal["roofline", "paper", "linear"] | None = _flag(None, "cost model form (default: the profile's)")

    num_gpu_blocks_override: int | None = _flag(None, "GPU KV blocks, instead of sizing them from memory", "N")
    num_cpu_blocks_override: int | None = _flag(None, "host KV blocks, instead of sizing them from --swap-space", "N")
    block_size: int | None = _flag(None, "tokens per KV block (default: the policy's, vLLM's 16)", "N")
    max_num_seqs: int | None = _flag(None, "most sequences in one iteration (default: the policy's, vLLM's 256)", "N")
    max_num_batched_tokens: int | None = _flag(
        None, "most tokens in one iteration (default: the policy's; vLLM's max(max-model-len, 2048), chunked 512)", "N"
    )
    max_model_len: int | None = _flag(None, "longest context (default: the model's)", "N")
    enable_chunked_prefill: bool | None = _flag(
        None, "split prompts and batch them with decodes (default: above 32,768 tokens of context, as vLLM 0.5.5)"
    )
    enable_prefix_caching: bool | None = _flag(
        None, "keep KV blocks for prompts that begin alike (hash_ids of the trace) (default: the policy's)"
    )
    gpu_memory_utilization: float = _flag(0.9, "share of GPU memory the engine may use", "F")
    disable_hybrid_kv_cache_manager: bool = _flag(
        False, "keep the whole context for layers with a sliding window too, where other layers have none"
    )
    swap_space: float | None = _flag(
        None, "host memory for KV per GPU, GiB (default: the policy's; compare: the largest of them, for all)", "GIB"
    )

    goodput: tuple[str, ...] = _flag((), "SLOs a request must meet, ms: ttft:3000 tpot:200 e2el:60000")

    @property
    def num_engines(self) -> int:
        """Engines of the run."""
        if self.prefill_replicas is None:
            return self.replicas or 1
        return self.prefill_replicas + (self.decode_replicas or 0)

    def of_pool(self, role: str) -> "Scenario":
        """As the engines that only prefill, or only decode, have it: `role` is their options' prefix."""
        own = {name: getattr(self, f"{role}_{name}") for name in ("tp", "pipeline_parallel_size", "gpu", "profile")}
        found = {name: value for name, value in own.items() if value is not None}
        if "gpu" in found and "profile" not in found:
            # The constants of the other pool's GPU would not fit.
            found["profile"] = None
        return replace(self, **found)

    def as_dict(self) -> dict[str, Any]:
        """All options as plain values, for the result."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


ALIASES = {alias: f.name for f in fields(Scenario) if (alias := f.metadata["alias"])}
"""Other names of options, and their own."""
PREEMPTION_MODE = "preemption_mode"
"""vLLM 0.5.5's option, which chooses between two of its presets."""


@dataclass(frozen=True)
class Outputs:
    """What a run prints and writes beside its result; flags and scenario keys like those of `Scenario`."""

    quiet: bool = _flag(False, "print nothing but errors and warnings")
    save_detailed: bool = _flag(False, "keep every inter-token latency (itls)")
    timeline: bool = _flag(False, "write timeline.json.gz for Perfetto, and series.csv")
    figures: bool | None = _flag(None, "draw figures (default: compare does, run does not)")
    step: bool = _flag(False, "simulate every iteration alone instead of jumping")


def _plain(value: Any) -> Any:  # noqa: ANN401
    return list(value) if isinstance(value, tuple) else value


def build_options(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """`Scenario` or `Outputs` from option values, of which None are left out and others than its own ignored."""
    found = {f.name: (values.get(f.name), hint) for f, hint in option_fields(kind)}
    return kind(
        **{name: convert(flag(name), value, hint) for name, (value, hint) in found.items() if value is not None}
    )


def build_scenario(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Scenario:
    """A checked scenario from option values; `sources` says which file an option's value came from, for messages."""
    scenario = build_options(Scenario, values)
    try:
        _check(scenario)
    except OptionError as error:
        source = (sources or {}).get(error.name)
        raise UserError(f"{source}: {error}" if source else str(error)) from None
    return scenario


class OptionError(UserError):
    """An option's value is out of range."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{flag(name)}: {message}")
        self.name = name


POSITIVE = ("num_prompts", "rate_scale", "burstiness", "clip", "input_len", "output_len", "tp", "block_size")
POSITIVE += ("num_gpu_blocks_override", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "request_rate")
POSITIVE += ("hash_block_tokens", "default_prompt_tokens", "default_output_tokens")
POSITIVE += ("max_concurrency", "replicas", "prefill_replicas", "decode_replicas", "link_gbps")
POSITIVE += ("prefill_tp", "decode_tp", "pipeline_parallel_size")
POSITIVE += ("prefill_pipeline_parallel_size", "decode_pipeline_parallel_size")
MOST = {"num_prompts": 10**9} | dict.fromkeys(("replicas", "prefill_replicas", "decode_replicas"), 100_000)
"""What a machine can count through in days, and hold."""
NOT_NEGATIVE = ("num_cpu_blocks_override", "swap_space", "seed")
READING = (
    "time_unit",
    "hash_block_tokens",
    "zero_tokens",
    "tokenizer",
    "default_prompt_tokens",
    "default_output_tokens",
)
"""Options of a trace's reader, named as `traces.readers.open_trace` names them."""
OF_WORKLOADS = tuple(name for name in ABOUT if name not in READING)
"""Options of some workloads alone (`traces.workloads.OPTIONS`)."""
SHAPING = ("workload", "num_prompts", "request_rate", "burstiness", "rate_scale", "clip", "input_len", "output_len")
SHAPING += (*OF_WORKLOADS, "max_concurrency", "closed_sessions")
"""Options that make other traffic than what a trace holds."""
GOES_WITH = {"trace_format": "trace"} | {name: "trace" for name in READING if name not in ABOUT}
GOES_WITH |= dict.fromkeys(("input_len", "output_len"), "workload")
GOES_WITH |= {"prefill_replicas": "decode_replicas"}
GOES_WITH |= dict.fromkeys(("decode_replicas", "link_gbps", "prefill_tp", "decode_tp"), "prefill_replicas")
GOES_WITH |= dict.fromkeys(("prefill_pipeline_parallel_size", "decode_pipeline_parallel_size"), "prefill_replicas")
GOES_WITH |= dict.fromkeys(("prefill_gpu", "decode_gpu", "prefill_profile", "decode_profile"), "prefill_replicas")


def _check(scenario: Scenario) -> None:
    if (scenario.trace is None) == (scenario.workload is None):
        given = "both are" if scenario.trace is not None else "neither is"
        raise UserError(f"--trace FILE and --workload NAME: {given} given; give one")
    for name, owner in GOES_WITH.items():
        value = getattr(scenario, name)
        if value is not None and getattr(scenario, owner) is None:
            raise OptionError(name, f"{value} goes with {flag(owner)}, which is not given; leave it out, or give both")
    for name in ABOUT:
        value = getattr(scenario, name)
        if value is not None and not _takes(scenario, name):
            owners = ["--trace"] * (name in READING) + [f"--workload {taker}" for taker in takers(name)]
            raise OptionError(name, f"{value} goes with {' or '.join(owners)}; leave it out")
    if scenario.burstiness != 1.0 and scenario.trace is not None and scenario.request_rate is None:
        raise OptionError("burstiness", "shapes the arrivals of --request-rate, which is not given; leave it out")
    if scenario.closed_sessions and scenario.workload not in (None, "sessions"):
        raise OptionError("closed_sessions", f"--workload {scenario.workload} has no sessions; give one that has")
    for name in POSITIVE:
        value = getattr(scenario, name)
        if value is not None and not value > 0:
            raise OptionError(name, f"{value} is not greater than 0; give more")
    for name, most in MOST.items():
        value = getattr(scenario, name)
        if value is not None and value > most:
            raise OptionError(name, f"{value} is more than any machine simulates; give at most {most}")
    for name in NOT_NEGATIVE:
        value = getattr(scenario, name)
        if value is not None and value < 0:
            raise OptionError(name, f"{value} is negative; give 0 or more")
    if scenario.router is not None and scenario.num_engines == 1:
        raise OptionError(
            "router", f"{scenario.router} has one engine only to choose from; give --replicas of 2 or more"
        )
    if scenario.prefill_replicas is not None:
        _check_pools(scenario)
    if not 0.0 < scenario.gpu_memory_utilization <= 1.0:
        value = scenario.gpu_memory_utilization
        raise OptionError("gpu_memory_utilization", f"{value} is not in (0, 1]; vLLM's default is 0.9")
    if scenario.clip is not None and scenario.clip < 2:
        raise OptionError("clip", f"{scenario.clip} leaves no room for a prompt and an output; give 2 or more")


def _takes(scenario: Scenario, option: str) -> bool:
    """Whether the traffic has an option of workloads. Who names none that is known hears so of the generator."""
    if scenario.workload is None:
        return option in READING
    return scenario.workload not in WORKLOADS or option in OPTIONS.get(scenario.workload, ())


def _check_pools(scenario: Scenario) -> None:
    if scenario.replicas is not None:
        raise OptionError("replicas", f"{scenario.replicas} engines that do both go without pools; leave it out")
    if scenario.link_gbps is None:
        raise OptionError("link_gbps", "is missing: KV goes from prefill to decode engines; give the link's Gbit/s")
    if scenario.link_gbps == inf:
        raise OptionError("link_gbps", "inf is not a speed; give Gbit/s, 1e9 for a link that takes no time")
