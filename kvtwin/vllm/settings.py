"""What the scheduler is told: `--additional-config '{"kvtwin": {...}}'` and vLLM's own configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario, build_options
from sim.parts.batching.unified_options import VllmV1Options
from sim.run.prepare import Setup, prepare
from sim.systems.base import Policy

KEY = "kvtwin"
"""Of `--additional-config`."""
OF_MACHINE = ("model", "gpu", "profile", "cost_form", "engine_profile", "dtype", "quantization", "kv_cache_dtype")
NAMES = ("policy", *OF_MACHINE, "goodput", "seed")
"""What may be said, by the names of `kvtwin run`'s options."""
DECIDED = (
    "model", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching",
)  # fmt: skip
"""What vLLM has decided, by the same names."""


@dataclass(frozen=True)
class EngineFacts:
    """What vLLM has decided, by its own names; `options` are those of `SchedulerConfig` that `vllm-v1` has as well.

    `num_gpu_blocks` are those that can be allocated: without the null block.
    """

    model: str
    tensor_parallel_size: int
    num_gpu_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    async_scheduling: bool
    options: Mapping[str, Any]


def read_settings(config: object) -> dict[str, Any]:
    """What `--additional-config` says to us. UserError for names that there are none of."""
    told = config.get(KEY, {}) if isinstance(config, Mapping) else {}
    if not isinstance(told, Mapping):
        raise UserError(f"--additional-config: {KEY} is {told!r}, not an object of options")
    unknown = [name for name in told if name not in NAMES]
    if unknown:
        raise UserError(f"--additional-config: {KEY}.{unknown[0]}: no such option; known: {', '.join(NAMES)}")
    return dict(told)


def make_setup(told: Mapping[str, Any], facts: EngineFacts, default_policy: str | None) -> Setup:
    """The preset, the machine that it predicts with, and the limits that vLLM has.

    Raises:
        UserError: no policy or GPU is named, or they, the model and vLLM's configuration do not go together.
    """
    where = f"--additional-config: {KEY}"
    text = told.get("policy", default_policy)
    if text is None:
        raise UserError(f'{where}.policy: not given; name a preset, as in {{"{KEY}": {{"policy": "vllm-v1"}}}}')
    if "gpu" not in told:
        raise UserError(f"{where}.gpu: not given; policies predict with its prices: name it, as for kvtwin run --gpu")
    policy = _policy(text, facts)
    values = {
        **{name: getattr(facts, name) for name in DECIDED},
        **{name: value for name, value in told.items() if name != "policy"},
        "tp": facts.tensor_parallel_size,
        "enable_chunked_prefill": facts.enable_chunked_prefill or None,
        "num_gpu_blocks_override": facts.num_gpu_blocks + policy.num_null_blocks,
        "swap_space": 0.0,
    }
    if isinstance(values.get("goodput"), list):
        values["goodput"] = tuple(values["goodput"])
    setup = prepare(build_options(Scenario, values), text, policy)
    if setup.limits.window is not None or setup.limits.states is not None:
        raise UserError(f"{where}.model: {setup.model.name} has layers that do not keep the whole context")
    return setup


def _policy(text: str, facts: EngineFacts) -> Policy:
    """The preset, with vLLM's options where it has them; UserError where vLLM has one that it lacks."""
    _, policy = parse_policy(text, {})
    if policy.is_unified:
        policy = policy.with_async_scheduling(facts.async_scheduling)
    elif facts.async_scheduling:
        raise UserError(f"{policy.name} schedules no step ahead: start vLLM with --no-async-scheduling")
    plain = VllmV1Options()
    for name, value in facts.options.items():
        if value == getattr(plain, name):
            continue
        if not isinstance(policy, VllmV1Options):
            raise UserError(f"--{name.replace('_', '-')} {value}: {policy.name} has no such option; leave it out")
        policy = replace(policy, **{name: value})
    if "predictor=" not in text and hasattr(policy, "predictor"):
        # vLLM knows no output's length. `bucket` and `oracle` would take `max_tokens` for it.
        policy = replace(policy, predictor="none")
    return policy
