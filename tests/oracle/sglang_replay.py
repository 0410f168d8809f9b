"""Replays a workload of the SGLang oracle on our `sglang` and compares with SGLang's answer."""

import gzip
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from v1_replay import beyond_the_clear, request_differences, requests_of

from kvtwin.testing import engines
from sim.engine.decisions import DecisionLog
from sim.engine.limits import Limits, StateLimits, WindowLimits
from sim.systems.base import EngineLimits
from sim.systems.sglang.batching import ExtendFirst
from sim.systems.sglang.memory import TreeMemory
from sim.systems.sglang.preset import Sglang

OPTIONS = {
    "policy": "schedule_policy",
    "conservativeness": "schedule_conservativeness",
    "max_prefill": "max_prefill_tokens",
    "mixed": "enable_mixed_chunk",
    "priority": "enable_priority_scheduling",
    "low_first": "schedule_low_priority_values_first",
    "priority_threshold": "priority_scheduling_preemption_threshold",
    "hicache_ratio": "hicache_ratio",
    "eviction": "radix_eviction_policy",
    "ignore_eos": "ignore_eos",
    "declared": "max_new_tokens",
}
EXTRA = (
    "prefill_max_requests", "prefill_decode_interval", "prefill_decode_interval_min_bs", "disable_priority_preemption",
    "retraction_policy", "swa_full_tokens_ratio", "max_mamba_cache_size", "mamba_radix_cache_strategy",
    "mamba_track_interval", "max_queued_requests", "min_free_slots_delay", "scheduler_recv_interval",
)  # fmt: skip
TOTALS = ("iterations", "preemptions", "hit_tokens", "rehit_tokens", "evicted_tokens", "loaded_tokens")


PAGE_BYTES = 1e6


@dataclass
class Replay:
    """What came of it."""

    requests: dict[str, dict] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    sha256: str = ""


class Lines(DecisionLog):
    """Keeps what it hashes."""

    def __init__(self, found: Replay) -> None:
        super().__init__()
        self.found = found

    def __call__(self, line: str) -> None:
        self.found.lines.append(line)
        super().__call__(line)


def replay(answer: dict, folder: Path, *, jump: bool, checked: bool = False) -> Replay:
    """The answer's workload under the answer's settings."""
    args = answer["args"]
    options = {ours: args[theirs] for theirs, ours in OPTIONS.items()}
    extra = json.loads(args["extra"])
    options |= _storage_options(args, extra)
    options |= {name: extra.pop(name) for name in EXTRA if name in extra and extra[name] is not None}
    if rules := extra.pop("radix_eviction_policy_config", None):
        options["radix_eviction_policy_config"] = json.dumps(rules)
    assert not extra, extra
    if args["hicache"]:
        options |= {"enable_hierarchical_cache": True, "hicache_write_policy": args["hicache"]}
    policy = Sglang(
        **options,
        disable_overlap_schedule=not args["overlap"],
        disable_radix_cache=args["no_radix"],
        max_running_requests=args["max_running"],
    )
    limits = Limits(
        num_gpu_blocks=args["pool"] // args["page"],
        num_cpu_blocks=0,
        block_size=args["page"],
        block_bytes=PAGE_BYTES,
        max_model_len=args["context"],
        max_num_seqs=args["max_running"],
        max_num_batched_tokens=args["chunk"] if args["chunk"] > 0 else args["context"],
        enable_chunked_prefill=args["chunk"] > 0,
        enable_prefix_caching=not args["no_radix"],
    )
    if "window" in args:
        # SGLang's window leaves the query's own token out.
        engine = EngineLimits(args["max_running"], limits.max_num_batched_tokens, limits.enable_chunked_prefill)
        pool = policy.window_pool(args["window"] + 1, args["page"], engine)
        assert pool is not None
        own = pool.blocks(limits.num_gpu_blocks, args["page"])
        # Either kind of layers has one.
        block_bytes = PAGE_BYTES * (1 + policy.swa_full_tokens_ratio)
        window = WindowLimits(args["window"] + 1, own_blocks=own, own_bytes=PAGE_BYTES)
        limits = replace(limits, window=window, block_bytes=block_bytes)
    if "state_chunk" in args:
        engine = EngineLimits(args["max_running"], limits.max_num_batched_tokens, limits.enable_chunked_prefill)
        pool = policy.state_pool(args["page"], engine, cached=not args["no_radix"], ranks=1)
        assert pool is not None and pool.num_states is not None
        # A copy of one takes as long as that of a token.
        own_bytes = PAGE_BYTES / args["page"]
        states = StateLimits(own_slots=pool.num_states, own_bytes=own_bytes, chunk_tokens=args["state_chunk"])
        seats = min(args["max_running"], pool.num_states // pool.per_request)
        limits = replace(limits, states=states, max_num_seqs=seats)
    costs = tuple(map(float, args["cost"].split(",")))
    # By default SGLang's copies were free, and over at once.
    copy_s = args.get("copy_s", 0.0) * args["page"]
    machine = engines.linear_machine(PAGE_BYTES, prefill=costs[:3], decode=costs[3:], swap_s_per_block=copy_s)
    found = Replay()

    def listen(scheduler):
        assert isinstance(scheduler.batching, ExtendFirst)
        scheduler.batching.record = Lines(found)
        return lambda plan, start_s, times: None

    requests = requests_of(answer, folder / "workloads")
    outcome = engines.simulate(policy, requests, limits, machine=machine, jump=jump, checked=checked, observe=listen)
    for seq in outcome.ended:
        found.requests[str(seq.request.request_id)] = {
            "first": seq.first_token_s if seq.num_generated or not seq.error else None,
            "finish": None if seq.error else seq.finish_s,
            "preempted": seq.num_preemptions,
            "hit": seq.num_cached_tokens if seq.num_generated or not seq.error else None,
            "output": None if seq.error else seq.num_generated,
        }
    memory, counters = outcome.scheduler.memory, outcome.scheduler.counters
    assert isinstance(memory, TreeMemory)
    record = outcome.scheduler.batching.record
    assert record is not None
    found.sha256 = record.sha256
    found.totals = {
        "iterations": len(found.lines),
        "preemptions": counters.preemptions,
        "hit_tokens": counters.prefix_hit_tokens,
        "rehit_tokens": counters.prefix_rehit_tokens,
        "evicted_tokens": memory.num_evicted * memory.block_size,
        "loaded_tokens": memory.tier.hit_tokens,
    }
    return found


def _storage_options(args: dict, extra: dict) -> dict:
    """Of HiCache's storage, taken out of `extra`."""
    config = json.loads(extra.pop("hicache_storage_backend_extra_config", "{}"))
    found = {f"hicache_storage_{name}": value for name, value in config.items()}
    found |= {name: extra.pop(name) for name in list(extra) if name.startswith("hicache_storage")}
    if found:
        for way in ("read", "write"):
            found[f"hicache_storage_{way}_gb_per_s"] = PAGE_BYTES / (args[f"storage_{way}_s"] * args["page"]) / 1e9
        found["hicache_storage_latency_us"] = args["storage_latency_s"] * 1e6
    return found


def differences(found: Replay, answer: dict) -> list[str]:
    """Where the replay differs from SGLang."""
    wrong = [*request_differences(found.requests, answer, ("preempted", "hit", "output"), "SGLang")]
    args = answer["args"]
    if args["hicache"] == "write_back" and args["overlap"] and args.get("copy_s"):
        # Ours are up to one copy early: `sim/systems/sglang/preset.py` says why.
        wrong = [one for one in wrong if " first: " not in one and " finish: " not in one]
    for name in TOTALS:
        if name == "loaded_tokens" and answer["preemptions"]:
            # A request that was retracted keeps what its first admission loaded, and the oracle adds that again.
            continue
        if found.totals[name] != answer[name]:
            wrong.append(f"{name}: {found.totals[name]} where SGLang has {answer[name]}")
    if found.sha256 != answer["decisions_sha256"]:
        wrong.append("decisions differ")
    return wrong


def first_difference(found: Replay, answer: dict) -> str:
    """The first of the steps in clear that differs."""
    for step, (start_s, kind, entries, preempted, hits, free) in enumerate(answer["clear"]):
        line = f"{kind} " + " ".join(f"{request}:{tokens}" for request, tokens in entries)
        if preempted:
            line += " preempt " + " ".join(map(str, preempted))
        if step >= len(found.lines) or found.lines[step] != line:
            ours = found.lines[step] if step < len(found.lines) else "nothing"
            return f"step {step} at {start_s}: {ours} where SGLang has {line} (hits {hits}, {free} free)"
    return beyond_the_clear(found.lines, answer["checkpoints"])


def read(path: Path) -> dict:
    """An answer as `sglang_oracle.py` writes it, perhaps compressed."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def main() -> None:
    """Compare with every answer in a folder; workloads lie in its `workloads`, or that of the folder above."""
    folder = Path(sys.argv[1])
    wrong = found = 0
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")]):
        if sys.argv[2:] and not any(word in path.name for word in sys.argv[2:]):
            continue
        answer = read(path)
        found += 1
        for jump in (True, False):
            try:
                ours = replay(answer, folder.parent, jump=jump)
            except Exception as error:
                wrong += 1
                print(f"{path.name}, jump={jump}: {type(error).__name__}: {error}")
                continue
            if differ := differences(ours, answer):
                wrong += 1
                print(f"{path.name}, jump={jump}: {len(differ)}: {differ[0]}; {first_difference(ours, answer)}")
    print(f"{found} workloads, {wrong} runs of them differ")


if __name__ == "__main__":
    main()
