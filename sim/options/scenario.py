"""`Scenario`: everything that makes a run, as the CLI, a TOML file or a caller states it. Each field is a flag.

Flags are spelled as vLLM spells them where vLLM has one. `sim.options.policies` has the policies' own.
"""

from collections.abc import Mapping
from dataclasses import Field, field, fields, replace
from functools import partial
from math import inf
from typing import Any, Literal, TypeVar

from sim.errors import UserError
from sim.frozen import frozen
from sim.options.values import convert, flag, option_fields
from traces.workloads import ABOUT, OPTIONS, WORKLOADS, option_help, takers

Options = TypeVar("Options")


def _flag(
    default: Any,  # noqa: ANN401
    help_text: str,
    metavar: str | None = None,
    *,
    unit: str | None = None,
    alias: str | None = None,
    above: int | None = None,
    least: int | None = None,
    most: int | None = None,
    goes_with: str | None = None,
    sparse: bool = False,
) -> Any:  # noqa: ANN401
    """The dataclass field of an option.

    Args:
        default: None where it is resolved later, or means nothing unless given.
        help_text: what `--help` and docs/results.md say.
        metavar: the value, in the help.
        unit: what the value is counted in, where the name does not say it.
        alias: another name of it, vLLM's own.
        above: what the value is greater than.
        least: what it is at least.
        most: what it is at most.
        goes_with: the option without which it means nothing.
        sparse: whether a result leaves it out where it was not given.
    """
    told = {"help": help_text, "metavar": metavar, "unit": unit, "alias": alias, "sparse": sparse}
    limits = {"above": above, "least": least, "most": most, "goes_with": goes_with}
    return field(default=default, metadata=told | limits)


_count = partial(_flag, metavar="N", above=0)
_of_trace = partial(_flag, None, goes_with="trace")
_of_pools = partial(_flag, None, goes_with="prefill_replicas", sparse=True)
LEAST_LINK, MOST_LINK = 1e-3, 1e9
"""Gbit/s: of a modem, and what no copy notices."""
MOST_PROMPTS, MOST_ENGINES = 10**9, 100_000
"""What a machine can count through in days, and hold."""


def _of_workload(name: str, metavar: str, unit: str | None = None) -> Any:  # noqa: ANN401
    return _flag(None, option_help(name), metavar, unit=unit, sparse=True)


@frozen
class Scenario:
    """Traffic, deployment, engine limits and what to measure. Units are in the names or in the help texts."""

    trace: str | None = _flag(
        None, "trace file to replay (Azure, Mooncake, BurstGPT, Vidur, ShareGPT, CSV ...)", "FILE"
    )
    trace_format: str | None = _of_trace("format of --trace, where it cannot be told from the file", "NAME")
    time_unit: str | None = _of_trace("unit of the trace's timestamps, where the format leaves it open", "UNIT")
    hash_block_tokens: int | None = _count(
        None, "tokens of a block of the trace's hash ids (Mooncake: 512, Bailian: 16; --workload sessions: 16)"
    )
    zero_tokens: Literal["error", "drop", "one"] | None = _of_trace(
        "rows of the trace with 0 prompt or output tokens: refuse (the default), drop, or read as 1 token"
    )
    tokenizer: str | None = _of_trace(
        "tokenizer.json for a trace of prompts in words, or bytes:4 to estimate their lengths", "PATH"
    )
    default_prompt_tokens: int | None = _of_trace("length of the trace's prompts that have none", "N", above=0)
    default_output_tokens: int | None = _of_trace("length of the trace's outputs that have none", "N", above=0)
    workload: str | None = _flag(None, f"generated traffic instead of a trace: {', '.join(WORKLOADS)}", "NAME")
    num_prompts: int | None = _count(None, "requests to take (trace: all, workload: 1000)", most=MOST_PROMPTS)
    request_rate: float | None = _flag(
        None, "requests/s; with --trace replaces its arrival times", "R", unit="requests/s", above=0
    )
    burstiness: float = _flag(
        1.0, "gamma shape of the arrivals of --request-rate; 1 is Poisson, less is burstier", "B", above=0
    )
    rate_scale: float = _flag(1.0, "speed the arrivals up by this factor", "X", above=0)
    clip: int | None = _flag(
        None,
        "cut requests to this context length: output up to half of it, then the prompt",
        "TOKENS",
        unit="tokens",
        above=0,
    )
    input_len: int | None = _count(
        None, "prompt tokens of the workload: of each request, or their mean", unit="tokens", goes_with="workload"
    )
    output_len: int | None = _count(
        None, "output tokens of the workload, likewise", unit="tokens", goes_with="workload"
    )
    range_ratio: float | None = _of_workload("range_ratio", "X")
    end_rate: float | None = _of_workload("end_rate", "R", "requests/s")
    burst_factor: float | None = _of_workload("burst_factor", "X")
    burst_period: float | None = _of_workload("burst_period", "S", "s")
    burst_duration: float | None = _of_workload("burst_duration", "S", "s")
    turns: float | None = _of_workload("turns", "X")
    think_time: float | None = _of_workload("think_time", "S", "s")
    shared_prefix: int | None = _of_workload("shared_prefix", "N", "tokens")
    prefix_groups: int | None = _of_workload("prefix_groups", "N")
    max_context: int | None = _of_workload("max_context", "N", "tokens")
    documents: int | None = _of_workload("documents", "N")
    document_len: int | None = _of_workload("document_len", "N", "tokens")
    corpus: int | None = _of_workload("corpus", "N")
    skew: float | None = _of_workload("skew", "X")
    max_concurrency: int | None = _count(
        None, "most requests in flight: the next is sent when one ends, or at its arrival if that is later", sparse=True
    )
    closed_sessions: bool = _flag(
        False, "a session's next turn waits for the last answer, then for the trace's gap between the two", sparse=True
    )
    seed: int = _flag(0, "seed of everything random", "N", least=0)

    model: str = _flag("llama-2-7b", "built-in model name, or a Hugging Face config.json", "M")
    dtype: Literal["auto", "half", "float16", "bfloat16", "float32"] = _flag(
        "auto", "of weights and KV cache (auto: the model's, 16 bits unless it is quantised)"
    )
    quantization: Literal["fp8", "modelopt_fp4"] | None = _flag(
        None,
        "of all layers' weights and of their products' inputs, as if the checkpoint were so; modelopt_fp4 is NVFP4 "
        "(default: as the model's config.json says; awq, gptq, compressed-tensors and others are read from there)",
        sparse=True,
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "kivi2"] = _flag(
        "auto",
        "of the KV cache (auto: the model's); int8 and int4 have a scale and a zero point per 64 elements, "
        "kivi2 (2 bits) per 32, and the last 128 tokens as they were computed",
    )
    sparse_attention: str | None = _flag(
        None, "attend to a part of the context, or keep one: quest:budget=N, snapkv:budget=N and others of "
        "docs/sparse-attention.md, further options behind commas", "METHOD:...", sparse=True,
    )  # fmt: skip
    gpu: str = _flag("a100-80g", "GPU name, or the file of a specification", "G")
    tp: int = _count(1, "GPUs in the tensor-parallel group", unit="GPUs", alias="tensor_parallel_size")
    pipeline_parallel_size: int | None = _count(
        None, "stages that the layers of an engine lie on, each of --tp GPUs, with as many batches in flight",
        sparse=True,
    )  # fmt: skip
    pp_layer_partition: str | None = _flag(
        None, "layers of each of these stages, as 20,21,21 (vLLM's VLLM_PP_LAYER_PARTITION; default: as equal as can "
        "be, more in the middle)", "N,N,...", goes_with="pipeline_parallel_size", sparse=True,
    )  # fmt: skip
    data_parallel_size: int | None = _count(
        None, "ranks of an engine, each with its own scheduler and KV on --tp GPUs; of a model with experts they share "
        "these and iterate together", most=MOST_ENGINES, sparse=True,
    )  # fmt: skip
    enable_expert_parallel: bool = _flag(
        False, "whole experts lie on each GPU of an engine, instead of a share of every expert", sparse=True
    )
    all2all_backend: str | None = _flag(
        None, "what dispatches tokens to whole experts of data-parallel ranks: allgather_reducescatter (the default), "
        "deepep_high_throughput or deepep_low_latency", "NAME", sparse=True,
    )  # fmt: skip
    expert_skew: float | None = _flag(
        None, "how unlike experts are chosen: the i-th as often as 1/i^X, which is which drawn by --seed (default: 0, "
        "all alike)", "X", least=0, sparse=True,
    )  # fmt: skip
    replicas: int | None = _count(
        None, "engines behind --router, each with its own GPUs (default: 1)", most=MOST_ENGINES, sparse=True
    )
    autoscale: str | None = _flag(
        None, "replicas that come and go by a rule: hpa:target=N,max=N or dynamo:max=N, further options behind commas; "
        "--replicas is how many there are at first (default: its min, 1)", "RULE:OPTION=VALUE,...", sparse=True,
    )  # fmt: skip
    router: (
        Literal["round-robin", "least-loaded", "power-of-two", "session-affinity", "prefix-affinity", "llm-d", "dynamo"]
        | None
    ) = _flag(None, "which of several engines gets a request (default: round-robin)", sparse=True)
    router_weights: tuple[str, ...] = _flag(
        (), "what --router llm-d adds up (queue:2 kv:2 prefix:3), or dynamo (overlap:1)", sparse=True
    )
    prefill_replicas: int | None = _count(
        None, "engines that only prefill and hand over to --decode-replicas; for policies that can (distserve)",
        most=MOST_ENGINES, goes_with="decode_replicas", sparse=True,
    )  # fmt: skip
    decode_replicas: int | None = _of_pools(
        "engines that only decode what others prefilled", "N", above=0, most=MOST_ENGINES
    )
    link_gbps: float | None = _of_pools(
        "link of each engine to others, Gbit/s (gigabits, as networks are sold) in each direction", "GBPS",
        unit="Gbit/s", above=0,
    )  # fmt: skip
    prefill_tp: int | None = _of_pools(
        "GPUs in the group of an engine that prefills (default: --tp)", "N", unit="GPUs", above=0
    )
    decode_tp: int | None = _of_pools("the same of an engine that decodes", "N", unit="GPUs", above=0)
    prefill_pipeline_parallel_size: int | None = _of_pools(
        "stages of an engine that prefills (default: --pipeline-parallel-size)", "N", above=0
    )
    decode_pipeline_parallel_size: int | None = _of_pools("the same of an engine that decodes", "N", above=0)
    prefill_gpu: str | None = _of_pools("GPU of the engines that prefill (default: --gpu)", "G")
    decode_gpu: str | None = _of_pools("GPU of the engines that decode", "G")
    prefill_profile: str | None = _of_pools("constants of the engines that prefill (default: --profile)", "NAME|FILE")
    decode_profile: str | None = _of_pools("constants of the engines that decode", "NAME|FILE")
    profile: str | None = _flag(None, "fitted constants: a shipped profile or a file (default: the GPU's)", "NAME|FILE")
    engine_profile: str | None = _flag(
        None,
        "host time and CUDA graphs of the engine: vllm-0.5, vllm-v1, vllm-v1-async, sglang-0.3, kvtwin, a file, "
        "vllm==0.11 for that of a release, or own for that of each policy's time (default: vllm-v1-async for all, "
        "vllm-v1 in series; prices of the forms linear and paper are all there is)",
        "NAME|FILE|own",
        alias="engine",
        sparse=True,
    )
    cost_form: Literal["roofline", "paper", "linear"] | None = _flag(None, "cost model form (default: the profile's)")

    num_gpu_blocks_override: int | None = _count(None, "GPU KV blocks, instead of sizing them from memory")
    num_cpu_blocks_override: int | None = _flag(
        None, "host KV blocks, instead of sizing them from --swap-space", "N", least=0
    )
    block_size: int | None = _count(None, "tokens per KV block (default: the policy's, vLLM's 16)", unit="tokens")
    max_num_seqs: int | None = _count(None, "most sequences in one iteration (default: the policy's, vLLM's 256)")
    max_cudagraph_capture_size: int | None = _count(
        None, "tokens of the largest CUDA graph; in iterations beyond it the host launches kernel by kernel (default: "
        "the engine profile's, vLLM's 512, at most twice --max-num-seqs)", unit="tokens", sparse=True,
    )  # fmt: skip
    max_num_batched_tokens: int | None = _count(
        None, "most tokens in one iteration (default: the policy's; vLLM's max(max-model-len, 2048), chunked 512)",
        unit="tokens",
    )  # fmt: skip
    max_model_len: int | None = _count(None, "longest context (default: the model's)", unit="tokens")
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
        None, "host memory for KV per GPU, GiB (default: the policy's; compare: the largest of them, for all)", "GIB",
        unit="GiB a GPU", least=0,
    )  # fmt: skip

    goodput: tuple[str, ...] = _flag((), "SLOs a request must meet, ms: ttft:3000 tpot:200 e2el:60000")

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._values().values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._values().items())})"

    @property
    def num_engines(self) -> int:
        """Schedulers of the run: data-parallel ranks are engines each; of replicas that are scaled the most at once."""
        if self.autoscale is not None:
            from sim.topology.autoscalers import parse_autoscale  # noqa: PLC0415 - most runs have one engine

            return parse_autoscale(self.autoscale).max
        if self.prefill_replicas is None:
            return (self.replicas or 1) * (self.data_parallel_size or 1)
        return self.prefill_replicas + (self.decode_replicas or 0)

    @property
    def flag_of_engines(self) -> str:
        """The flag that asks for several schedulers, where the run has them."""
        if self.autoscale is not None:
            return flag("autoscale")
        names = ("data_parallel_size", "replicas")
        return flag(next((name for name in names if (getattr(self, name) or 1) > 1), "prefill_replicas"))

    def of_pool(self, role: str) -> "Scenario":
        """As the engines that only prefill, or only decode, have it: `role` is their options' prefix."""
        own = {name: getattr(self, f"{role}_{name}") for name in ("tp", "pipeline_parallel_size", "gpu", "profile")}
        found = {name: value for name, value in own.items() if value is not None}
        if "gpu" in found and "profile" not in found:
            # The constants of the other pool's GPU would not fit.
            found["profile"] = None
        return replace(self, **found)


ALIASES = {alias: f.name for f in fields(Scenario) if (alias := f.metadata["alias"])}
"""Other names of options, and their own."""


@frozen
class Outputs:
    """What a run prints and writes beside its result; flags and scenario keys like those of `Scenario`."""

    quiet: bool = _flag(False, "print nothing but errors and warnings")
    save_detailed: bool = _flag(False, "keep every inter-token latency (itls)")
    timeline: bool = _flag(False, "write timeline.json.gz for Perfetto, and series.csv")
    figures: bool | None = _flag(None, "draw figures (default: compare does, run does not)")
    step: bool = _flag(False, "simulate every iteration alone instead of jumping")


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


OF_LAYOUTS = ("tp", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "replicas", "router")
OF_LAYOUTS += ("pp_layer_partition",)
OF_LAYOUTS += ("all2all_backend", "prefill_replicas", "decode_replicas", "prefill_tp", "decode_tp")
OF_LAYOUTS += ("prefill_pipeline_parallel_size", "decode_pipeline_parallel_size")
"""Options that say which engines there are, and on how many GPUs."""
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
GOES_WITH: dict[str, str] = {f.name: owner for f in fields(Scenario) if (owner := f.metadata["goes_with"])}
"""Options, and those without which they mean nothing."""


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
    if scenario.burstiness != 1.0 and scenario.request_rate == inf:
        raise OptionError("burstiness", "shapes arrivals, and with --request-rate inf all come at once; leave it out")
    if scenario.swap_space is not None and scenario.num_cpu_blocks_override is not None:
        blocks = f"--num-cpu-blocks-override {scenario.num_cpu_blocks_override}"
        raise OptionError("swap_space", f"{scenario.swap_space} does nothing beside {blocks}; leave one of them out")
    share = scenario.gpu_memory_utilization
    if share != Scenario.gpu_memory_utilization and scenario.num_gpu_blocks_override is not None:
        blocks = f"--num-gpu-blocks-override {scenario.num_gpu_blocks_override}"
        # vLLM takes both, and has just so many blocks.
        raise OptionError("gpu_memory_utilization", f"{share} does nothing beside {blocks}; leave one of them out")
    if scenario.closed_sessions and scenario.workload not in (None, "sessions"):
        raise OptionError("closed_sessions", f"--workload {scenario.workload} has no sessions; give one that has")
    for f in fields(Scenario):
        _check_limits(f, getattr(scenario, f.name))
    if (
        scenario.router is not None
        and scenario.prefill_replicas is None
        and (scenario.replicas or 1) == 1
        and scenario.autoscale is None
    ):
        raise OptionError(
            "router", f"{scenario.router} has one engine only to choose from; give --replicas of 2 or more"
        )
    if scenario.autoscale is not None:
        _check_autoscale(scenario)
    if scenario.prefill_replicas is not None:
        _check_pools(scenario)
    if scenario.expert_skew is not None and not scenario.enable_expert_parallel:
        raise OptionError("expert_skew", "goes with --enable-expert-parallel, without which no GPU has whole experts")
    if scenario.all2all_backend is not None and not (scenario.enable_expert_parallel and scenario.data_parallel_size):
        # vLLM ignores it then.
        raise OptionError("all2all_backend", "goes with --data-parallel-size and --enable-expert-parallel; give both")
    if not 0.0 < scenario.gpu_memory_utilization <= 1.0:
        value = scenario.gpu_memory_utilization
        raise OptionError("gpu_memory_utilization", f"{value} is not in (0, 1]; vLLM's default is 0.9")
    if scenario.clip is not None and scenario.clip < 2:
        raise OptionError("clip", f"{scenario.clip} leaves no room for a prompt and an output; give 2 or more")


REMEMBERING = ("prefix-affinity", "llm-d", "dynamo")
"""Routers that know engines by their number."""


def _check_autoscale(scenario: Scenario) -> None:
    from sim.topology.autoscalers import parse_autoscale  # noqa: PLC0415 - as above

    options, first = parse_autoscale(scenario.autoscale or ""), scenario.replicas
    for name in ("prefill_replicas", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(scenario, name) not in (None, 1):
            value = f"{flag(name)} {getattr(scenario, name)}"
            raise OptionError("autoscale", f"{scenario.autoscale} scales replicas, engines alike; leave out {value}")
    if scenario.router in REMEMBERING:
        raise OptionError("router", f"{scenario.router} remembers engines by number, and --autoscale replaces them")
    if first is not None and not options.min <= first <= options.max:
        raise OptionError("replicas", f"{first} at first is not min={options.min} to max={options.max} of --autoscale")


def _check_limits(option: Field[Any], value: float | None) -> None:
    above, least, most = (option.metadata[name] for name in ("above", "least", "most"))
    if value is None:
        return
    if above is not None and not value > above:
        raise OptionError(option.name, f"{value} is not greater than {above}; give more")
    if most is not None and value > most:
        raise OptionError(option.name, f"{value} is more than any machine simulates; give at most {most}")
    if least is not None and value < least:
        raise OptionError(option.name, f"{value} is negative; give {least} or more")


def _takes(scenario: Scenario, option: str) -> bool:
    """Whether the traffic has an option of workloads. An unknown workload is refused by the generator."""
    if scenario.workload is None:
        return option in READING
    return scenario.workload not in WORKLOADS or option in OPTIONS.get(scenario.workload, ())


def _check_pools(scenario: Scenario) -> None:
    if scenario.replicas is not None:
        raise OptionError("replicas", f"{scenario.replicas} engines that do both go without pools; leave it out")
    if scenario.data_parallel_size is not None:
        raise OptionError(
            "data_parallel_size", f"{scenario.data_parallel_size} ranks of an engine hand nothing over between pools; "
            "leave out one of the two"
        )  # fmt: skip
    if scenario.link_gbps is None:
        raise OptionError("link_gbps", "is missing: KV goes from prefill to decode engines; give the link's Gbit/s")
    if scenario.link_gbps == inf:
        raise OptionError("link_gbps", "inf is not a speed; give Gbit/s, 1e9 for a link that takes no time")
    if not LEAST_LINK <= scenario.link_gbps <= MOST_LINK:
        raise OptionError(
            "link_gbps", f"{scenario.link_gbps} Gbit/s is no link; give {LEAST_LINK} to 1e9, which takes no time"
        )
