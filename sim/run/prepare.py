"""From a scenario to a `Setup` for one policy: names looked up, pools sized, limits checked against each other."""

from collections.abc import Iterable
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from sim.cost.changed_profile import profile_named
from sim.cost.engine_profile import OF_POLICY, TODAYS, TODAYS_SERIAL, EngineProfile, load_engine_profile, release_of
from sim.cost.forms import build_cost
from sim.cost.model import CostModel
from sim.cost.profile import Profile, product_name
from sim.engine.limits import Limits, Role
from sim.errors import UserError
from sim.frozen import frozen
from sim.kv.offload_options import OffloadOptions
from sim.options.scenario import Scenario
from sim.options.values import flag
from sim.parts.batching.unified_options import VllmV1Options
from sim.parts.catalogue import BATCHINGS, MEMORIES
from sim.parts.options import Conditional, conditional_options
from sim.parts.stage.hand_over_options import MixedPoolOptions
from sim.results.goodput import Goodput
from sim.run.pool_sizes import default_swap_space_gib, has_rings, limits_of
from sim.specs.expert_layout import ALL_GATHER, GPUS_OF_A_NODE, HIGH_THROUGHPUT, LOW_LATENCY, ExpertLayout
from sim.specs.hardware import HardwareSpec, load_hardware
from sim.specs.kv_format import kv_dtype
from sim.specs.memory import OLDER
from sim.specs.models import ModelSpec, load_model
from sim.specs.stages import partitioned
from sim.systems.base import Asked, Policy
from sim.systems.builder import STORED

if TYPE_CHECKING:
    from sim.specs.sparse_attention import SparseAttention

FORMS_WITH_ENGINE = ("roofline", "table")
"""Prices of other forms are all there is."""
LOCKSTEP_BATCHINGS = ("unified", "extend-first")
PIPELINED_BATCHINGS = ("vllm", "sarathi", "fastgen", "iteration-level")
"""Of which each batch in flight has a scheduler of its own, a virtual engine."""
BUFFERED_TOKENS = 256
"""vLLM's budget where experts have buffers for every token (`DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP`)."""
QUANTIZATIONS = {"fp8": "fp8", "modelopt_fp4": "nvfp4"}
"""vLLM's `--quantization`, and the format of weights that it is."""
LEAST_FP8 = 7.5
"""Compute capability of the oldest GPUs that vLLM has kernels for, which unpack FP8 weights to 16 bits."""
HOPPER = 9.0
"""Likewise for an indexer; and the only one whose kernels of it `sim.cost.latents` is near."""
DTYPE_BYTES = {"half": 2.0, "float16": 2.0, "bfloat16": 2.0, "float32": 4.0}


@frozen
class Setup:
    """What a scenario resolves to for one policy."""

    scenario: Scenario
    policy: Policy
    label: str
    model: ModelSpec
    hardware: HardwareSpec
    profile: Profile
    limits: Limits
    cost: CostModel
    engine_profile: EngineProfile | None
    """What the engine costs beside the GPU; None where prices are all there is."""
    tp: int
    """GPUs of an engine."""
    role: Role = "both"
    decode: "Setup | None" = None
    """Of the engines that decode, where others prefill."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage of an engine, which are on `tp` GPUs each."""
    experts: ExpertLayout | None = None
    """Which GPUs share the routed experts, where that is not the tensor-parallel group."""
    warnings: list[str] = field(default_factory=list)
    conditional: tuple[Conditional, ...] = ()
    """Options given that act only with others: a run refuses those that do not, a study those that never do."""

    @property
    def pp(self) -> int:
        """Stages of an engine."""
        return len(self.stage_layers)

    @property
    def num_schedulers(self) -> int:
        """Of an engine: one, or as many virtual engines as it has stages, each with these limits (vLLM 0.5)."""
        return 1 if self.limits.stages > 1 else self.pp

    @property
    def front_end(self) -> tuple[float, float]:
        """As `EngineProfile.front_end`; nothing where prices have no engine, s and s/token."""
        return self.engine_profile.front_end() if self.engine_profile else (0.0, 0.0)

    @property
    def num_tokenisers(self) -> int:
        """A server has one, and so has each rank of vLLM's (`--api-server-count`); engines that decode need none."""
        scenario = self.scenario
        ranks = (scenario.data_parallel_size or 1) if self.policy.ranks_share_tokeniser else 1
        return scenario.prefill_replicas or scenario.num_engines // ranks

    def priced(self, profile: Profile, engine: EngineProfile | None) -> "Setup":
        """The same with other constants."""
        scenario = replace(self.scenario, tp=self.tp)
        cost = _cost(self.model, self.hardware, profile, scenario, self.limits, self.stage_layers, engine, self.experts)
        return replace(self, profile=profile, cost=cost, engine_profile=engine)


def prepare(scenario: Scenario, label: str, policy: Policy) -> Setup:
    """Resolve names, size the pools as vLLM does and check the limits against each other."""
    is_pooled = scenario.prefill_replicas is not None
    pools = [scenario.of_pool(role) for role in ("prefill", "decode")] if is_pooled else [scenario]
    if policy.async_scheduling_asked is None:
        policy = policy.with_async_scheduling(all(map(_hides_host, pools)))
    if not is_pooled:
        if policy.hands_over:
            raise UserError(
                f"--policy {policy.name}: hands sequences over from engines that prefill to others; give "
                "--prefill-replicas, --decode-replicas and --link-gbps"
            )
        return _routed(_prepare(scenario, scenario, label, policy, "both"))
    if not policy.hands_over:
        raise UserError(
            f"--prefill-replicas {scenario.prefill_replicas}: {label} decodes where it prefills "
            f"(stage={policy.names['stage']}) and cannot hand over; take distserve, or a policy that takes "
            "stage=hand-over"
        )
    prefill = _prepare(scenario, pools[0], label, policy, "prefill")
    decode = _prepare(scenario, pools[1], label, policy, "decode")
    warnings = list(dict.fromkeys((*prefill.warnings, *decode.warnings)))
    return _routed(replace(prefill, decode=decode, warnings=warnings))


def _routed(setup: Setup) -> Setup:
    """Itself; UserError where prompts would be sent after prefixes that no engine keeps, or two would route them."""
    router, policy = setup.scenario.router, setup.policy
    if router is not None or setup.scenario.router_weights:
        from sim.topology import DEFAULT_ROUTER, parse_weights  # noqa: PLC0415 - one engine has no router

        parse_weights(router or DEFAULT_ROUTER, setup.scenario.router_weights)
    if router is not None and policy.names["memory"] == STORED:
        raise UserError(f"--router {router}: {setup.label} has a conductor that routes; leave it out")
    if router is not None and setup.decode is not None and policy.options(MixedPoolOptions).mixed_pool:
        raise UserError(f"--router {router}: mixed pools have a scheduler that routes; leave it out")
    if router in ("prefix-affinity", "llm-d") and not setup.limits.enable_prefix_caching:
        raise UserError(
            f"--router {router}: engines of {setup.label} keep no prefixes; give "
            "--enable-prefix-caching (or a policy that does, as vllm-v1), or take another router"
        )
    return setup


def _prepare(asked_for: Scenario, scenario: Scenario, label: str, policy: Policy, role: Role) -> Setup:
    warnings: list[str] = []
    policy = _with_slos(policy, Goodput.parse(scenario.goodput))
    scenario = _with_told(scenario, policy)
    hardware = load_hardware(scenario.gpu)
    profile = profile_named(scenario.profile, hardware)
    model, sparse = _model(scenario, hardware, profile, warnings), None
    if model.kv_residual_tokens:
        _check_residual(scenario, profile, policy)
    if scenario.sparse_attention is not None:
        from sim.specs.sparse_attention import (  # noqa: PLC0415 - few runs have any
            parse_sparse_attention,
            with_sparse_attention,
        )

        sparse = parse_sparse_attention(scenario.sparse_attention)
        model = with_sparse_attention(model, sparse)
        _check_sparse(sparse, scenario, profile, policy)
        warnings.append(
            f"--sparse-attention {sparse.name}: memory and time alone; what it does to answers is not simulated, and "
            "choosing tokens is not priced"
        )
    max_model_len = scenario.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        warnings.append(
            f"--max-model-len {max_model_len} is beyond the {model.max_position_embeddings} positions of {model.name}"
        )
    most_tokens = scenario.max_num_batched_tokens
    if most_tokens is None and scenario.all2all_backend == LOW_LATENCY:
        most_tokens = BUFFERED_TOKENS
    wanted = scenario.max_num_seqs, most_tokens, scenario.enable_chunked_prefill
    engine = policy.engine_limits(
        Asked(max_model_len, *wanted, hardware.name, hardware.memory_bytes, scenario.data_parallel_size or 1)
    )
    if sparse is not None and sparse.needs_whole_prompts and engine.enable_chunked_prefill:
        raise UserError(
            f"--sparse-attention {sparse.name}: chooses what it keeps of a prompt as a whole, and {label} splits "
            "prompts; give --no-enable-chunked-prefill with a policy that computes them whole (vllm-recompute)"
        )
    warnings += engine.warnings
    conditional = tuple(conditional_options(policy.name, (policy, *policy.mixed_options), model))
    warnings += (one.told for one in conditional if not one.acts)
    warnings += filter(None, [MEMORIES[policy.names["memory"]].caveat])
    warnings += _other_slos(policy, Goodput.parse(scenario.goodput))
    warnings += _not_of_the_encoder(policy, scenario)
    stage_layers = _stage_layers(asked_for, scenario, model, policy, label, role)
    pp = len(stage_layers)
    experts = _experts(scenario, model, policy, label, pp, warnings)
    engine_profile = _engine_profile(scenario, hardware, profile, policy, pp)
    # A CPU captures no graphs, and its runtime's memory is the process's.
    is_gpu = hardware.copies_beside_compute
    memory = engine_profile.memory() if is_gpu and engine_profile is not None else OLDER
    limits = limits_of(
        scenario, model, hardware, policy, max_model_len, engine, memory, stage_layers, experts, sparse, warnings
    )
    warnings += _of_release(scenario, engine_profile)
    if pp > 1 and limits.stages == 1 and engine_profile is not None and engine_profile.host == "hidden":
        raise UserError(
            f"--engine-profile {engine_profile.name}: its host time is hidden behind the GPU, and the loop of virtual "
            "engines (--pipeline-parallel-size) is serial; give one whose host is serial (vllm-v1)"
        )
    cost = _cost(model, hardware, profile, scenario, limits, stage_layers, engine_profile, experts)
    return Setup(
        asked_for, policy, label, model, hardware, profile, limits, cost, engine_profile, scenario.tp, role,
        stage_layers=stage_layers, experts=experts, warnings=warnings, conditional=conditional,
    )  # fmt: skip


def _check_sparse(sparse: "SparseAttention", scenario: Scenario, profile: Profile, policy: Policy) -> None:
    """UserError where prices do not know what is read, or memory cannot forget what is not."""
    _check_form(f"--sparse-attention {sparse.name}", scenario, profile)
    names = policy.names
    if sparse.forgets and not has_rings(names):
        raise UserError(
            f"--sparse-attention {sparse.name}: memory={names['memory']} with eviction={names['eviction']} keeps the "
            "whole context; take vllm-recompute, vllm-swap, sarathi, fastgen or vllm-v1"
        )


def _check_residual(scenario: Scenario, profile: Profile, policy: Policy) -> None:
    """UserError where prices or copies of blocks leave out the last tokens, which no block holds as they are."""
    asked = f"--kv-cache-dtype {scenario.kv_cache_dtype}"
    _check_form(asked, scenario, profile)
    names = policy.names
    moved = {"memory": "paged", "eviction": "recompute", "stage": "direct"}
    others = [f"{kind}={names[kind]}" for kind, plain in moved.items() if names[kind] != plain]
    if policy.options(OffloadOptions).offloads:
        others.append("--kv-offloading-size")
    if others:
        raise UserError(
            f"{asked}: {', '.join(others)} may move or share KV, and last tokens that are not "
            "quantised are in no block; take vllm-recompute, sarathi, fastgen or vllm-v1, or int4"
        )


def _check_form(asked: str, scenario: Scenario, profile: Profile) -> None:
    """UserError where prices are those of attention to everything."""
    form = scenario.cost_form or profile.form
    if form in ("paper", "table"):
        raise UserError(
            f"{asked}: prices of form {form} are those of the whole context; take a profile of form roofline, or "
            "--cost-form roofline"
        )


def _cost(
    model: ModelSpec,
    hardware: HardwareSpec,
    profile: Profile,
    scenario: Scenario,
    limits: Limits,
    stage_layers: tuple[int, ...],
    engine: EngineProfile | None,
    experts: ExpertLayout | None,
) -> CostModel:
    """Prices of an engine of `scenario.tp` GPUs a stage, with the graphs that it captures."""
    if engine is not None:
        engine = engine.sized(limits.max_num_seqs, scenario.max_cudagraph_capture_size)
        if experts is not None and experts.backend == HIGH_THROUGHPUT:
            # vLLM and SGLang capture none then: the host waits for how many tokens come.
            engine = structs.replace(engine, graph_batch_sizes=())
    block_bytes = limits.block_bytes * (model.num_layers / max(stage_layers))
    return build_cost(model, hardware, profile, scenario.tp, block_bytes, scenario.cost_form, engine, experts)


def _with_told(scenario: Scenario, policy: Policy) -> Scenario:
    """The scenario with what the policy's options say of it; UserError where a flag says something else."""
    told = policy.told(scenario.block_size)
    for name, value in told.items():
        given = getattr(scenario, name)
        if given is not None and given != value:
            raise UserError(f"{flag(name)}: {given} where options of {policy.name} say {value}; leave one of them out")
    return replace(scenario, **told) if told else scenario


def _with_slos(policy: Policy, asked: Goodput) -> Policy:
    """With the SLOs that goodput counts, where options that keep SLOs leave theirs open."""
    slos_s = {"ttft_slo_ms": asked.ttft_s, "tpot_slo_ms": asked.tpot_s}

    def told(options: Any) -> Any:  # noqa: ANN401 - a policy, or options of any part
        left = [name for name, slo_s in slos_s.items() if slo_s is not None and getattr(options, name, 0.0) is None]
        return replace(options, **{name: round(1e3 * (slos_s[name] or 0.0), 9) for name in left}) if left else options

    return replace(told(policy), mixed_options=tuple(map(told, policy.mixed_options)))


def _not_of_the_encoder(policy: Policy, scenario: Scenario) -> list[str]:
    """What of an image encoder is not simulated."""
    if not policy.reads_images:
        return []
    told = []
    if policy.options(VllmV1Options).encoder_tokens_per_s is None:
        told.append("the image encoder takes no time: encoder-tokens-per-s=N is how many tokens yours gives a second")
    if scenario.num_gpu_blocks_override is None:
        told.append(
            "the image encoder's weights, activations and cache take nothing of the GPU's memory: "
            "--num-gpu-blocks-override is what your server's log says"
        )
    return told


def _other_slos(policy: Policy, asked: Goodput) -> list[str]:
    """What is said where a policy that keeps SLOs is told others than those that goodput counts."""
    found = []
    for options in (policy, *policy.mixed_options):
        if not hasattr(options, "tpot_slo_ms") or not getattr(options, "slo_aware", True):
            continue
        for name, slo_s in (("ttft", asked.ttft_s), ("tpot", asked.tpot_s)):
            told_ms = getattr(options, f"{name}_slo_ms", None)
            if slo_s is not None and told_ms is not None and abs(told_ms - 1e3 * slo_s) > 1e-6:
                found.append(
                    f"--goodput {name}:{1e3 * slo_s:g}: {policy.name} keeps to {told_ms:g} ms; "
                    f"{name}-slo-ms={1e3 * slo_s:g} is its option"
                )
    return found


def _model(scenario: Scenario, hardware: HardwareSpec, profile: Profile, warnings: list[str]) -> ModelSpec:
    """The model in the types that are asked for; `warnings` get what the profile does not know of these."""
    model = load_model(scenario.model)
    if scenario.dtype != "auto":
        model = model.with_dtype(DTYPE_BYTES[scenario.dtype])
    if scenario.quantization is not None:
        model = model.with_quantization(QUANTIZATIONS[scenario.quantization])
    capability = hardware.compute_capability
    if model.quantization == "fp8" and capability is not None and capability < LEAST_FP8:
        raise UserError(
            f"--gpu {hardware.name}: vLLM has no kernels for FP8 weights on compute capability {capability}, below "
            f"{LEAST_FP8}; take a newer GPU, or the model in 16 bits"
        )
    if model.indexer:
        _check_form(f"--model {model.name}", scenario, profile)
        if capability is not None and capability < HOPPER:
            raise UserError(
                f"--gpu {hardware.name}: vLLM has no kernels for the indexer of {model.name} on compute capability "
                f"{capability}, below {HOPPER}; take a newer GPU, or a model without index_topk"
            )
    if scenario.kv_cache_dtype != "auto":
        model = model.with_kv_dtype(kv_dtype(scenario.kv_cache_dtype, hardware))
        if profile.form == "linear":
            warnings.append(
                f"--kv-cache-dtype: times of profile {profile.name} are those of the KV it was measured with"
            )
    if (scenario.cost_form or profile.form) != "roofline":
        return model
    if model.indexer and capability != HOPPER:
        warnings.append(
            f"attention of {model.name} has prices of Hopper's kernels, a fifth to a quarter below what vLLM took on "
            "B200 (docs/sparse-attention.md)"
        )
    if model.gdn and model.gdn.scan_tokens:
        warnings.append(
            f"Mamba2's layers of {model.name} are priced by formula: no kernel of theirs was timed, no server compared"
        )
    warnings += _product_warnings(model, hardware, profile)
    if model.moe and profile.experts(model.expert_quantization) is None:
        warnings.append(
            "routed experts are priced as if they were dense matrices: "
            f"profile {profile.name} has no constants of kernels of their type of weights"
        )
    is_timed = model.fp8_kv and not model.mla and "fp8_kv_bytes_per_s" in profile.constants
    if model.kv_format(1).dequantize_ops_per_token_read and not is_timed:
        lacks = " has no fp8_kv_bytes_per_s" if model.fp8_kv and not model.mla else " knows no kernel for it"
        warnings.append(
            f"quantised KV is read at the rate of 16 bits, converted at an assumed one: profile {profile.name}{lacks}"
        )
    return model


def _product_warnings(model: ModelSpec, hardware: HardwareSpec, profile: Profile) -> list[str]:
    """What the profile does not know of products of quantised weights."""
    kind = model.quantization
    if model.quantised_flops_share and product_name(kind, "flops_per_s") not in profile.constants:
        if kind == "fp8" and not hardware.fp8_flops_per_s:
            return []
        lacks = f"profile {profile.name} has no {product_name(kind, 'flops_per_s')}"
        return [f"{kind.upper()} products are priced at the rate of 16 bits: {lacks}"]
    if not model.product_quantization and min(model.attention_dtype_bytes, model.mlp_dtype_bytes) < model.dtype_bytes:
        return ["quantised weights with inputs of 16 bits are priced as products of 16 bits that read fewer bytes"]
    return []


def with_one_swap_space(scenario: Scenario, policies: Iterable[Policy]) -> Scenario:
    """A scenario that gives all policies the same host memory: the largest of their defaults, unless one is asked for.

    Of pools the one that can have less decides.
    """
    if scenario.swap_space is not None or scenario.num_cpu_blocks_override is not None:
        return scenario
    pools = [scenario] if scenario.prefill_replicas is None else [scenario.of_pool(r) for r in ("prefill", "decode")]
    most_gib = (
        min(default_swap_space_gib(pool, policy, load_hardware(pool.gpu)) for pool in pools) for policy in policies
    )
    return replace(scenario, swap_space=max(most_gib))


def _stage_layers(
    asked_for: Scenario, scenario: Scenario, model: ModelSpec, policy: Policy, label: str, role: Role
) -> tuple[int, ...]:
    """Layers of each stage of an engine; UserError where the system or the model cannot be laid out on them."""
    stages, names, partition = scenario.pipeline_parallel_size or 1, policy.names, scenario.pp_layer_partition
    if stages == 1 and partition is None:
        return (model.num_layers,)
    own = f"{role}_pipeline_parallel_size" if role != "both" else ""
    name = flag(own if own and getattr(asked_for, own) is not None else "pipeline_parallel_size")
    where = f"{name}: {stages} stages"
    plain = names["eviction"] in ("recompute", "swap") and names["memory"] in ("paged", "reserved")
    if BATCHINGS[names["batching"]].queues_batches:
        _check_queued(f"{where} and {label}", policy)
    elif names["batching"] not in PIPELINED_BATCHINGS or not plain or policy.options(MixedPoolOptions).mixed_pool:
        raise UserError(
            f"{where} and {label}: batches in flight are modelled as vLLM v1's, and as virtual engines of vLLM 0.5.5, "
            "for policies that have batching=vllm, sarathi or fastgen, memory=paged or reserved and eviction=recompute "
            "or swap: take vllm-v1 or vllm-recompute"
        )
    found = partitioned(model.num_layers, stages, partition)
    if len(set(found)) > 1 and not BATCHINGS[names["batching"]].queues_batches:
        raise UserError(
            f"{where} do not have as many of the {model.num_layers} layers of {model.name} each: unlike stages are "
            f"simulated for vllm-v1, not {label}; give a divisor"
        )
    return found


def _check_queued(where: str, policy: Policy) -> None:
    """UserError for what is not simulated where vLLM v1 has several batches in flight."""
    plain = {"order": ("fcfs", "priority"), "memory": ("paged",), "eviction": ("recompute",), "stage": ("direct",)}
    others = [f"{kind}={policy.names[kind]}" for kind, names in plain.items() if policy.names[kind] not in names]
    if policy.options(OffloadOptions).offloads:
        others.append("--kv-offloading-size")
    if policy.options(VllmV1Options).max_tokens_per_image is not None:
        others.append("max-tokens-per-image")
    if others:
        raise UserError(f"{where}: {', '.join(others)}: not simulated where batches pass through stages; leave it out")


def _experts(
    scenario: Scenario, model: ModelSpec, policy: Policy, label: str, pp: int, warnings: list[str]
) -> ExpertLayout | None:
    """Which GPUs share the routed experts; None where the tensor-parallel group does. UserError where none can."""
    ranks, name = scenario.data_parallel_size or 1, flag("data_parallel_size")
    if scenario.enable_expert_parallel and model.moe is None:
        raise UserError(f"--enable-expert-parallel: {model.name} has no experts; leave it out")
    if ranks > 1 and pp > 1 and not BATCHINGS[policy.names["batching"]].queues_batches:
        raise UserError(f"{name}: {ranks} ranks of virtual engines are not modelled; leave one out, or take vllm-v1")
    ranks = policy.expert_ranks(model, ranks)
    decode, prefill = policy.all2all(scenario.all2all_backend)
    if decode != ALL_GATHER and ranks == 1:
        raise UserError(f"DeepEP ({decode}): is priced between data-parallel ranks; give {name} of 2 or more")
    if model.moe is None or (ranks == 1 and not scenario.enable_expert_parallel):
        return None
    if ranks > 1 and policy.names["batching"] not in LOCKSTEP_BATCHINGS:
        raise UserError(
            f"{name}: ranks that share experts iterate together in vLLM v1 and SGLang, and {label} has "
            f"batching={policy.names['batching']}; take vllm-v1 or sglang"
        )
    gpus = scenario.tp * ranks
    if gpus == 1:
        return None
    assert model.moe
    is_parallel = scenario.enable_expert_parallel or decode != ALL_GATHER
    if is_parallel and gpus > model.moe.num_experts:
        raise UserError(
            f"--enable-expert-parallel: {gpus} GPUs are more than the {model.moe.num_experts} experts of {model.name}; "
            "take fewer, or leave it out"
        )
    if ranks > 1 and gpus > GPUS_OF_A_NODE and decode == ALL_GATHER:
        warnings.append(
            f"experts of {gpus} GPUs: between nodes are links of 400 Gbit/s a GPU (assumed); their latency is left out"
        )
    skew = scenario.expert_skew or 0.0
    return ExpertLayout(scenario.tp, ranks, is_parallel, skew, scenario.seed, decode, prefill)


def _hides_host(scenario: Scenario) -> bool:
    """Whether vLLM 0.33 would schedule ahead by itself (`VllmConfig.__post_init__`): not on a CPU.

    Nor where there is nothing to hide: prices without an engine, and an engine that the user says is serial.
    """
    hardware = load_hardware(scenario.gpu)
    profile = profile_named(scenario.profile, hardware)
    form = scenario.cost_form or profile.form
    if form not in FORMS_WITH_ENGINE or hardware.name == "cpu":
        return False
    name = scenario.engine_profile or profile.engine_profile or TODAYS
    return name == OF_POLICY or load_engine_profile(name).host == "hidden"


def _engine_profile(
    scenario: Scenario, hardware: HardwareSpec, profile: Profile, policy: Policy, pp: int
) -> EngineProfile | None:
    """The engine's own costs; none in forms whose prices are all there is.

    Unless asked otherwise one engine prices all policies, so that they differ in themselves alone: that of the server
    to which the profile was fitted, else today's vLLM. Its host time is hidden behind the GPU, except on a CPU, with
    virtual engines, and where a scheduler of today was told to work between iterations.
    """
    form = scenario.cost_form or profile.form
    if form not in FORMS_WITH_ENGINE:
        if scenario.engine_profile not in (None, OF_POLICY):
            raise UserError(
                f"--engine-profile {scenario.engine_profile}: prices of form {form} are all there is, nothing is added "
                f"to them ({profile.name}); leave it out"
            )
        return None
    name = scenario.engine_profile or profile.engine_profile
    if name == OF_POLICY:
        name = policy.own_engine_profile
    elif name is None:
        is_virtual = pp > 1 and not BATCHINGS[policy.names["batching"]].queues_batches
        is_serial = hardware.name == "cpu" or is_virtual or policy.own_engine_profile == TODAYS_SERIAL
        name = TODAYS_SERIAL if is_serial else TODAYS
    found = load_engine_profile(name).measured_by(profile)
    if policy.schedules_ahead and found.host == "serial":
        raise UserError(
            f"--engine-profile {found.name}: its host time is added to each iteration, and async scheduling hides it; "
            "leave it out, or give one whose host is hidden (vllm-v1-async)"
        )
    return found


def _of_release(scenario: Scenario, engine: EngineProfile | None) -> list[str]:
    """What is said where the engine of a release of vLLM was asked for."""
    release = release_of(scenario.engine_profile or "")
    if release is None or engine is None:
        return []
    told = f"--engine {scenario.engine_profile}: priced as {engine.name}; decisions are those of the policy"
    if engine.name == TODAYS_SERIAL:
        told += (
            ". Requests that sample with top-k or top-p were sorted for, as --engine-profile vllm-0.12-top-p has it; "
            "vllm-v1-async is a server that was started with --async-scheduling"
        )
    return [told]
