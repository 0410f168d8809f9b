"""Replays a workload of the vLLM v1 oracle on our `vllm-v1` and compares with vLLM's answer."""

import gzip
import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kvtwin.testing import engines
from sim.engine.limits import Limits
from sim.parts.batching.unified import Unified
from sim.systems.vllm_v1 import VllmV1
from traces.readers import open_trace
from traces.request import Request

FLAGS = {
    "policy": "scheduling_policy",
    "long_prefill": "long_prefill_token_threshold",
    "long_prefill_adaptive": "long_prefill_token_threshold_adaptive",
    "watermark": "watermark",
    "async_scheduling": "async_scheduling",
}


@dataclass
class Replay:
    """What came of it."""

    requests: dict[str, dict] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    pools: list[tuple[int, int]] = field(default_factory=list)
    """Free blocks and evictions after each decision, where nothing is jumped."""
    evictions: int = 0
    preemptions: int = 0
    rehit_tokens: int = 0

    @property
    def sha256(self) -> str:
        return sha256(self.lines)


def sha256(lines: list[str]) -> str:
    digest = hashlib.sha256()
    for step, line in enumerate(lines):
        digest.update(f"{step} {line}\n".encode())
    return digest.hexdigest()


def requests_of(answer: dict, folder: Path) -> list[Request]:
    """The answer's workload: in the answer itself, or the file that it names."""
    if "workload" in answer:
        rows = enumerate(answer["workload"])
        return [Request(i, *row[:3], "", tuple(row[3]), 16, tuple(row[4]), row[5]) for i, row in rows]
    requests = list(open_trace(folder / answer["args"]["trace"]))
    if not answer["args"]["private_outputs"]:
        return requests
    return [
        request._replace(hash_ids=request.hash_ids[: request.prompt_tokens // 16], output_hash_ids=())
        for request in requests
    ]


def replay(answer: dict, folder: Path, *, jump: bool, checked: bool = False) -> Replay:
    """The answer's workload under the answer's settings."""
    args = answer["args"]
    requests = requests_of(answer, folder)
    options = {ours: args[theirs] for theirs, ours in FLAGS.items()}
    policy = VllmV1(**options, scheduler_reserve_full_isl=not args["no_reserve_full_isl"])
    limits = Limits(
        num_gpu_blocks=args["blocks"] - 1,
        num_cpu_blocks=0,
        block_size=16,
        block_bytes=1.0,
        max_model_len=args["max_model_len"],
        max_num_seqs=args["max_num_seqs"],
        max_num_batched_tokens=args["max_batched"],
        enable_chunked_prefill=True,
        enable_prefix_caching=not args["no_prefix_caching"],
    )
    costs = args["cost"] if "workload" in answer else tuple(map(float, args["cost"].split(",")))
    machine = engines.linear_machine(prefill=costs[:3], decode=costs[3:])
    found = Replay()

    def listen(scheduler):
        assert isinstance(scheduler.batching, Unified)
        scheduler.batching.record = found.lines.append
        pool, memory = scheduler.gpu, scheduler.memory
        return lambda plan, start_s, times: found.pools.append((pool.free, memory.num_evicted))

    outcome = engines.simulate(policy, requests, limits, machine=machine, jump=jump, checked=checked, observe=listen)
    for seq in outcome.ended:
        refused = seq.error != ""
        found.requests[str(seq.request.request_id)] = {
            "first": None if refused else seq.first_token_s,
            "finish": "rejected" if refused else seq.finish_s,
            "preempted": seq.num_preemptions,
            "hit": None if refused else seq.num_cached_tokens,
        }
    found.evictions = outcome.scheduler.memory.num_evicted
    found.preemptions = outcome.scheduler.counters.preemptions
    found.rehit_tokens = outcome.scheduler.counters.prefix_rehit_tokens
    return found


def differences(found: Replay, answer: dict) -> list[str]:
    """Where the replay differs from vLLM."""
    wrong = []
    for key, want in answer["requests"].items():
        got = found.requests[key]
        for name in ("first", "finish"):
            a, b = got[name], want[name]
            same = abs(a - b) < 1e-6 if isinstance(a, float) and isinstance(b, float) else a == b
            if not same:
                wrong.append(f"request {key} {name}: {a} where vLLM has {b}")
        for name in ("preempted", "hit"):
            if got[name] != want[name]:
                wrong.append(f"request {key} {name}: {got[name]} where vLLM has {want[name]}")
    for name in ("evictions", "preemptions", "rehit_tokens"):
        if getattr(found, name) != answer[name]:
            wrong.append(f"{name}: {getattr(found, name)} where vLLM has {answer[name]}")
    if found.sha256 != answer["decisions_sha256"]:
        wrong.append(f"decisions: {len(found.lines)} steps where vLLM has {answer['iterations']}")
    if len(found.pools) == len(found.lines) and "steps" in answer:
        for (_, line, free, evictions), pool in zip(answer["steps"], found.pools, strict=False):
            if pool != (free, evictions):
                wrong.append(f"free blocks, evictions: {pool} where vLLM has {free}, {evictions} after {line}")
                break
    return wrong


def first_difference(found: Replay, answer: dict) -> str:
    """The first of the steps in clear that differs."""
    if "steps" in answer:
        for step, (ours, (start_s, theirs, *_)) in enumerate(zip(found.lines, answer["steps"], strict=False)):
            if ours != theirs:
                return f"step {step} at {start_s}: {ours} where vLLM has {theirs}"
        return "at the end, or nowhere"
    for step, (_, entries, preempted, hits, free) in enumerate(answer["clear"]):
        line = " ".join(f"{request}:{tokens}" for request, tokens in entries)
        if preempted:
            line += " preempt " + " ".join(map(str, preempted))
        if found.lines[step] != line:
            return f"step {step}: {found.lines[step]} where vLLM has {line} (hits {hits}, {free} free)"
    digest, step = hashlib.sha256(), 0
    for checkpoint in answer["checkpoints"]:
        for line in found.lines[step : step + 100]:
            digest.update(f"{step} {line}\n".encode())
            step += 1
        if digest.hexdigest()[:12] != checkpoint:
            return f"between steps {step - 100} and {step}"
    return "at the end, or nowhere"


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def read_case(path: Path) -> dict:
    """An answer of `vllm_v1_oracle.py`, as `read` has them."""
    answer = json.loads(gzip.decompress(path.read_bytes()))
    columns = answer["requests"]
    limit = answer["args"]["max_model_len"]
    answer["requests"] = {
        str(i): {name: column[i] for name, column in columns.items()} for i in range(len(answer["workload"]))
    }
    for i, row in enumerate(answer["workload"]):
        if row[1] >= limit:
            answer["requests"][str(i)]["finish"] = "rejected"
    answer["decisions_sha256"] = sha256([step[1] for step in answer["steps"]])
    return answer


def main() -> None:
    """Compare with every answer in a folder that `make_cases_v1.py` has filled."""
    wrong = found = 0
    for path in sorted(Path(sys.argv[1]).glob("*.json.gz")):
        answer = read_case(path)
        found += 1
        for jump in (True, False):
            ours = replay(answer, path.parent, jump=jump, checked=not jump)
            if differ := differences(ours, answer):
                wrong += 1
                print(f"{path.name}, jump={jump}: {differ[0]}; {first_difference(ours, answer)}")
    print(f"{found} workloads, {wrong} runs of them differ")


if __name__ == "__main__":
    main()
