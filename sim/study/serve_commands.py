"""A deployment as commands: `vllm serve` or SGLang's server, a Kubernetes manifest, and the `kvtwin run` of it."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sim.options.policies import options_of
from sim.options.scenario import OF_WORKLOADS, READING, SHAPING, Scenario
from sim.options.values import flag, option_fields
from sim.parts.stage.speculative_options import SpeculativeOptions
from sim.specs.models import HUB_IDS, load_model
from sim.study.points import policy_of

VLLM_VERSION = "0.33.0"
"""Whose decisions `vllm-v1` makes."""
PORT, PREFILL_PORT, DECODE_PORT, NIXL_PORT = 8000, 8100, 8200, 5600
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
"""In vLLM's repository: what its documentation of NIXL names."""
HEAD = "HEAD"
"""Stands for a drafting head's weights, which only the user can name."""
ENGINE = (
    "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "all2all_backend",
    "max_num_batched_tokens", "max_num_seqs", "kv_cache_dtype", "block_size", "max_model_len", "dtype", "quantization",
    "gpu_memory_utilization", "num_gpu_blocks_override", "max_cudagraph_capture_size",
    "disable_hybrid_kv_cache_manager", "enable_prefix_caching", "num_cpu_blocks_override", "swap_space",
)  # fmt: skip
"""Options of any policy that a server is told."""
UNTOLD_BY_VLLM = ("num_cpu_blocks_override", "swap_space")
"""Those that vLLM v1 has no flag for; others have the same name there."""
SGLANG_FLAGS = {
    "max_num_batched_tokens": "--chunked-prefill-size", "max_num_seqs": "--max-running-requests",
    "max_model_len": "--context-length", "block_size": "--page-size", "pipeline_parallel_size": "--pp-size",
    "dtype": "--dtype", "quantization": "--quantization", "kv_cache_dtype": "--kv-cache-dtype",
    "data_parallel_size": "--dp-size", "enable_expert_parallel": "--ep-size",
}  # fmt: skip
"""Options of ours that SGLang's server calls otherwise."""
UNTOLD_BY_SGLANG = ("max_new_tokens", "ignore_eos", "lpm_longest")
"""Of the policies' own: what requests ask for, and a constant of SGLang's source."""
REFUSED_BY_SGLANG = {"radix_eviction_policy": ("fifo", "mru", "filo")}
"""Values that its server's command line does not take, though its radix tree has them."""
SPECULATION = tuple(field.name for field in fields(SpeculativeOptions))
SERVED_STAGES = ("direct", "hand-over", "nixl")
TRAFFIC = ("trace", "trace_format", *READING, *SHAPING, *OF_WORKLOADS)


def served_model(name: str) -> str:
    """What servers are told: the hub's name of a model that ships, else the user's own."""
    return HUB_IDS.get(name, (name,))[0]


def is_sglang(options: Mapping[str, Any]) -> bool:
    """Whether the policy is SGLang's."""
    return policy_of(options)[1].name in ("sglang", "radix")


def serves(options: Mapping[str, Any]) -> bool:
    """Whether there is a server of today with that policy, and which attends and drafts as asked."""
    policy = policy_of(options)[1]
    mixed = any(kind != "stage" or part not in SERVED_STAGES for kind, part in policy.mixed)
    return policy.name in ("vllm-v1", "sglang", "radix") and not mixed and not _unserved(options)


def _asked(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the engine was asked for, by flag: what its server is told, and what that has no flag for.

    What is as it would be without being said is left out.
    """
    usual = {field.name: field.default for field in fields(Scenario)}
    asked = {name: options[name] for name in ENGINE if options.get(name, usual[name]) != usual[name]}
    sglang, policy = is_sglang(options), policy_of(options)[1]
    untold: set[str] = set(usual).difference(SGLANG_FLAGS) if sglang else {*UNTOLD_BY_VLLM}
    for option in options_of(type(policy)):
        value = getattr(policy, option.name)
        if value == option.field.default or option.name in SPECULATION:
            continue
        asked[option.name] = value
        is_refused = option.name in UNTOLD_BY_SGLANG or value in REFUSED_BY_SGLANG.get(option.name, ())
        if is_refused or not (sglang or option.is_plain):
            untold.add(option.name)
    for part in policy.mixed_options:
        given = {f.name: value for f, _ in option_fields(type(part)) if (value := getattr(part, f.name)) != f.default}
        asked |= given
        untold |= given.keys()
    theirs = SGLANG_FLAGS if sglang else {}
    told = {theirs.get(name, flag(name)): value for name, value in asked.items() if name not in untold}
    return told, {flag(name): value for name, value in asked.items() if name in untold}


def _unserved(options: Mapping[str, Any]) -> str:
    """What is asked for beside the policy that no server of today has."""
    method = options.get("sparse_attention")
    if method:
        return f" with --sparse-attention {method}"
    return " with --spec-method sparse_kv" if _speculative_config(options).get("method") == "sparse_kv" else ""


def _speculative_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `--speculative-config`, empty where nothing drafts. Acceptance is the server's own: no rate is told."""
    policy = policy_of(options)[1]
    if not isinstance(policy, SpeculativeOptions) or policy.spec_method is None:
        return {}
    config: dict[str, Any] = {"method": policy.spec_method, "num_speculative_tokens": policy.spec_tokens}
    if policy.spec_model is not None:
        config["model"] = served_model(policy.spec_model)
    elif policy.spec_method in ("eagle", "eagle3"):
        config["model"] = HEAD
    return config


def _left_open(options: Mapping[str, Any]) -> list[str]:
    """What the commands leave to be filled in, as comments of a shell and of YAML."""
    lines = []
    if _speculative_config(options).get("model") == HEAD:
        model = served_model(options["model"])
        lines.append(f"# {HEAD}: put the weights of a head that was trained for {model} in its place")
    if untold := _asked(options)[1]:
        said = " ".join(_words(untold))
        lines.append(f"# no flag of the server says {said}: it does not run as it was simulated unless you set this")
    return lines


def serve_commands(options: Mapping[str, Any]) -> list[str]:
    """The commands that start the deployment on one machine, comments among them."""
    if not serves(options):
        return [f"# no server of today runs {policy_of(options)[0]}{_unserved(options)}: it is a paper's, or a mix"]
    return [*_left_open(options), *_servers(options)]


def _servers(options: Mapping[str, Any]) -> list[str]:
    if "prefill_replicas" in options:
        return _pools(options)
    count, tp = options.get("replicas") or 1, options.get("tp", 1)
    gpus, sglang = _gpus(options, tp), is_sglang(options)
    words = (_sglang if sglang else _vllm)(options, tp)
    if count == 1:
        return [shlex.join(words)]
    dense = load_model(options["model"]).moe is None and not options.get("data_parallel_size")
    if dense and not sglang and options.get("router") != "prefix-affinity":
        # vLLM's own balancer takes the engine with the fewest requests.
        return [shlex.join([*words, "--data-parallel-size", str(count)])]
    lines = [
        f"CUDA_VISIBLE_DEVICES={_devices(place * gpus, gpus)} {shlex.join([*words, '--port', str(PORT + 1 + place)])} &"
        for place in range(count)
    ]
    policy = "cache_aware" if options.get("router") == "prefix-affinity" else "power_of_two"
    urls = [f"http://localhost:{PORT + 1 + place}" for place in range(count)]
    router = ["python", "-m", "sglang_router.launch_router"] if sglang else ["vllm-router"]
    return [*lines, shlex.join([*router, "--policy", policy, "--port", str(PORT), "--worker-urls", *urls])]


def _pools(options: Mapping[str, Any]) -> list[str]:
    """Engines that prefill, engines that decode, and the proxy between them."""
    lines, device, ports = [], 0, {"prefill": PREFILL_PORT, "decode": DECODE_PORT}
    side = NIXL_PORT
    for role, first in ports.items():
        tp = options.get(f"{role}_tp") or options.get("tp", 1)
        for place in range(options[f"{role}_replicas"]):
            own = f"CUDA_VISIBLE_DEVICES={_devices(device, tp)} VLLM_NIXL_SIDE_CHANNEL_PORT={side} "
            words = [*_vllm(options, tp), "--port", str(first + place), "--kv-transfer-config", NIXL]
            lines.append(f"{own}{shlex.join(words)} &")
            device, side = device + tp, side + 1
    proxy = ["python", PROXY, "--port", str(PORT)]
    for role, first in ports.items():
        count = options[f"{role}_replicas"]
        kind = {"prefill": "prefiller", "decode": "decoder"}[role]
        proxy += [f"--{kind}-hosts", *["localhost"] * count]
        proxy += [f"--{kind}-ports", *(str(first + place) for place in range(count))]
    return [*lines, shlex.join(proxy)]


def _vllm(options: Mapping[str, Any], tp: int) -> list[str]:
    partition = options.get("pp_layer_partition")
    words = ["env", f"VLLM_PP_LAYER_PARTITION={partition}"] if partition else []
    words += ["vllm", "serve", served_model(options["model"])]
    if tp > 1:
        words += ["--tensor-parallel-size", str(tp)]
    words += _words(_asked(options)[0])
    if config := _speculative_config(options):
        words += ["--speculative-config", json.dumps(config, separators=(",", ":"))]
    return words


def _sglang(options: Mapping[str, Any], tp: int) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", served_model(options["model"])]
    told = _asked(options)[0]
    if "--enable-dp-attention" in told:
        # SGLang counts the GPUs of all ranks.
        tp *= options.get("data_parallel_size") or 1
    if "--ep-size" in told:
        told["--ep-size"] = tp
    words += ["--tp", str(tp)] * (tp > 1)
    if told.get("--kv-cache-dtype") == "fp8":
        told["--kv-cache-dtype"] = "fp8_e4m3"
    return words + _words(told)


def _words(told: Mapping[str, Any]) -> list[str]:
    """Flags and their values as words of a shell."""
    words: list[str] = []
    for shown, value in told.items():
        if isinstance(value, bool):
            words.append(shown if value else shown.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [shown, *map(str, value)]
        else:
            words += [shown, _text(value)]
    return words


def run_command(options: Mapping[str, Any], out: str) -> str:
    """The `kvtwin run` of a deployment and its traffic, with options by field."""
    usual = {name: field.default for name, field in Scenario.__dataclass_fields__.items()}
    words = ["kvtwin", "run"]
    for name in sorted(options, key=lambda name: (name not in TRAFFIC, name != "model")):
        value = options[name]
        if value is None or (name in usual and value == usual[name]):
            continue
        words += _words({flag(name): value})
    return shlex.join([*words, "--out", out])


def manifest(options: Mapping[str, Any]) -> str | None:
    """The deployment for Kubernetes, in YAML; None where no server of today has the policy."""
    if not serves(options):
        return None
    return "".join(f"{line}\n" for line in _left_open(options)) + _deployments(options)


def _deployments(options: Mapping[str, Any]) -> str:
    name = served_model(options["model"]).split("/")[-1].lower().replace(".", "-").replace("_", "-")
    if "prefill_replicas" not in options:
        tp, count = options.get("tp", 1), options.get("replicas") or 1
        words = (_sglang if is_sglang(options) else _vllm)(options, tp)
        return _workload(name, count, _gpus(options, tp), words, sglang=is_sglang(options))
    parts = [
        "# Prefill and decode pools. Before both services stands a proxy that sends each prompt to a prefill engine,\n"
        "# then to a decode engine: llm-d's, or the one that vLLM's documentation of NIXL names.\n"
    ]
    for role in ("prefill", "decode"):
        tp = options.get(f"{role}_tp") or options.get("tp", 1)
        words = [*_vllm(options, tp), "--kv-transfer-config", NIXL]
        parts.append(_workload(f"{name}-{role}", options[f"{role}_replicas"], tp, words, sglang=False))
    return parts[0] + "---\n".join(parts[1:])


def _workload(name: str, count: int, gpus: int, words: list[str], *, sglang: bool) -> str:
    """A Deployment of `count` engines and their Service."""
    port = 30000 if sglang else PORT
    image = "lmsysorg/sglang:latest" if sglang else f"vllm/vllm-openai:v{VLLM_VERSION}"
    command = [*words, "--host", "0.0.0.0", "--port", str(port)]
    args = "".join(f"            - {_yaml(word)}\n" for word in command)
    return f"""apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}
spec:
  replicas: {count}
  selector:
    matchLabels: {{app: {name}}}
  template:
    metadata:
      labels: {{app: {name}}}
    spec:
      containers:
        - name: server
          image: {image}
          command:
{args}          ports:
            - containerPort: {port}
          resources:
            limits: {{nvidia.com/gpu: {gpus}}}
          readinessProbe:
            httpGet: {{path: /health, port: {port}}}
          volumeMounts:
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: shm
          emptyDir: {{medium: Memory, sizeLimit: 16Gi}}
---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  selector: {{app: {name}}}
  ports:
    - port: {PORT}
      targetPort: {port}
"""


def _yaml(word: str) -> str:
    """A word in single quotes, which YAML takes as it is."""
    return "'" + word.replace("'", "''") + "'"


def _gpus(options: Mapping[str, Any], tp: int) -> int:
    """Of one engine."""
    return tp * (options.get("pipeline_parallel_size") or 1) * (options.get("data_parallel_size") or 1)


def _devices(first: int, count: int) -> str:
    return ",".join(str(first + place) for place in range(count))


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and value == round(value, 6) else str(value)
