"""Replays a workload of the vLLM v1 oracle on our `vllm-v1` and compares with vLLM's answer."""

import gzip
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from kvtwin.testing import engines
from sim.engine.acceptance import Acceptance
from sim.engine.decisions import DecisionLog
from sim.engine.limits import Limits, StateLimits, WindowLimits
from sim.kv.memory import Memory
from sim.kv.tiers.connector import OffloadingConnector
from sim.kv.tiers.drive import Drive
from sim.parts.batching.unified import Unified
from sim.systems.vllm_v1 import VllmV1
from traces.adapters import apart
from traces.readers import open_trace
from traces.request import Image, Request

FLAGS = {
    "policy": "scheduling_policy",
    "long_prefill": "long_prefill_token_threshold",
    "long_prefill_adaptive": "long_prefill_token_threshold_adaptive",
    "watermark": "watermark",
    "async_scheduling": "async_scheduling",
}
OFFLOADING = (
    "cpu_chunks", "blocks_per_chunk", "eviction_policy", "store_threshold", "offload_outputs", "load_s_per_block",
    "store_s_per_block",
)  # fmt: skip


@dataclass
class Replay:
    """What came of it."""

    requests: dict[str, dict] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    all_lines: list[str] = field(default_factory=list)
    """The same with their steps, and what is copied."""
    pools: list[tuple[int, int]] = field(default_factory=list)
    """Free blocks and evictions after each decision, where nothing is jumped."""
    evictions: int = 0
    preemptions: int = 0
    rehit_tokens: int = 0

    sha256: str = ""
    loaded: dict[str, int] = field(default_factory=dict)
    """Tokens loaded from the host, by request."""


class Lines(DecisionLog):
    """Keeps what it hashes."""

    def __init__(self, found: Replay, memory: Memory) -> None:
        super().__init__()
        self.found, self.memory = found, memory

    def __call__(self, line: str) -> None:
        self.found.all_lines.append(f"{self.num_steps} {line}")
        self.found.lines.append(line)
        self.found.pools.append((self.memory.gpu.free, self.memory.num_evicted))
        super().__call__(line)

    def copies(self, line: str, *, of_last: bool) -> None:
        super().copies(line, of_last=of_last)
        self.found.all_lines.append(f"{self.num_steps - of_last}{line}")
        if " load " in line:
            for word in line.split(" load ")[1].split(" store ")[0].split(" flush ")[0].split():
                request, tokens = word.split(":")
                self.found.loaded[request] = self.found.loaded.get(request, 0) + int(tokens)


def requests_of(answer: dict, folder: Path) -> list[Request]:
    """The answer's workload: in the answer itself, or the file that it names."""
    if "workload" in answer:
        return [request_of(i, *row) for i, row in enumerate(answer["workload"])]
    requests = list(open_trace(folder / answer["args"]["trace"]))
    if not answer["args"]["private_outputs"]:
        return requests
    return [
        request._replace(hash_ids=request.hash_ids[: request.prompt_tokens // 16], output_hash_ids=())
        for request in requests
    ]


def request_of(
    number: int, arrival_s: float, prompt_tokens: int, output_tokens: int, ids: list[int], output_ids: list[int],
    priority: int, lora: int = 0, images: Sequence[list[int]] = (),
) -> Request:  # fmt: skip
    """A row of a workload, as a trace's reader makes it."""
    name = f"adapter {lora}" if lora else ""
    named = (apart(name, tuple(ids)), 16, apart(name, tuple(output_ids)))
    seen = tuple(Image(*one) for one in images)
    return Request(number, arrival_s, prompt_tokens, output_tokens, "", *named, priority, images=seen, lora=name)


def hand_over_first(connector: OffloadingConnector, request_id: int) -> None:
    """Let the connector hear of that request's end before it hears of others' that end in the same step."""
    build = connector.build

    def build_reordered(*args: Any) -> str:
        ended = connector._ended.items()
        connector._ended = dict(sorted(ended, key=lambda one: one[0].seq.request.request_id != request_id))
        return build(*args)

    connector.build = build_reordered


def replay(answer: dict, folder: Path, *, jump: bool, checked: bool = False, ended_first: int | None = None) -> Replay:
    """The answer's workload under the answer's settings; `ended_first` as `hand_over_first` has it."""
    args = answer["args"]
    requests = requests_of(answer, folder)
    options = {ours: args[theirs] for theirs, ours in FLAGS.items()}
    if "cpu_chunks" in args:
        options |= {name: args[name] for name in OFFLOADING}
    if args.get("storage"):
        options["storage_space"] = inf
    if args.get("max_loras"):
        options |= {"enable_lora": True, "max_loras": args["max_loras"]}
    if args.get("spec_method"):
        options |= {"spec_method": args["spec_method"], "spec_tokens": args["spec_tokens"], "acceptance_rate": 0.0}
        options["spec_model"] = "llama-2-7b" if args["spec_method"] == "draft_model" else None
    if largest := args.get("max_tokens_per_image"):
        options |= {"max_tokens_per_image": largest, "disable_chunked_mm_input": args["whole_images"]}
        options["encoder_tokens_per_s"] = 1 / args["encoder_s_per_token"] if args["encoder_s_per_token"] else None
    policy = VllmV1(**options, scheduler_reserve_full_isl=not args["no_reserve_full_isl"])
    window = None
    if args.get("window"):
        blocks = -(-args["window"] // 16)
        window = WindowLimits(args["window"], args["num_full"], args["num_window"], blocks, args["window_first"])
    states, num_state = None, args.get("num_state", 0)
    if num_state:
        states = StateLimits(args["num_full"], num_state, args["exports_states"])
    limits = Limits(
        num_gpu_blocks=(args["blocks"] - 1) // (args.get("num_full", 1) + args.get("num_window", 0) + num_state),
        num_cpu_blocks=0,
        block_size=16,
        block_bytes=1.0,
        max_model_len=args["max_model_len"],
        max_num_seqs=args["max_num_seqs"],
        max_num_batched_tokens=args["max_batched"],
        enable_chunked_prefill=True,
        enable_prefix_caching=not args["no_prefix_caching"],
        window=window,
        states=states,
        stages=args.get("stages", 1),
    )
    costs = args["cost"] if "workload" in answer else tuple(map(float, args["cost"].split(",")))
    machine = engines.linear_machine(prefill=costs[:3], decode=costs[3:])
    found = Replay()

    def listen(scheduler):
        assert isinstance(scheduler.batching, Unified)
        scheduler.batching.record = Lines(found, scheduler.memory)
        if args.get("spec_method"):
            # The answer's own draws; there drafting takes no time.
            scheduler.stage.acceptance = Acceptance(tuple(args["acceptance"]), args["acceptance_seed"])
            scheduler.stage.drafter = None
        if args.get("storage"):
            read_s, write_s = args["storage_read_s_per_block"], args["storage_write_s_per_block"]
            scheduler.batching.connector.drive = Drive(1.0, read_bytes_per_s=1 / read_s, write_bytes_per_s=1 / write_s)
        if ended_first:
            hand_over_first(scheduler.batching.connector, ended_first)
        return lambda plan, start_s, times: None

    outcome = engines.simulate(policy, requests, limits, machine=machine, jump=jump, checked=checked, observe=listen)
    for seq in outcome.ended:
        refused = seq.error != ""
        found.requests[str(seq.request.request_id)] = {
            "first": None if refused else seq.first_token_s,
            "finish": "rejected" if refused else seq.finish_s,
            "preempted": seq.num_preemptions,
            "hit": None if refused else seq.num_cached_tokens,
        }
    found.sha256 = outcome.scheduler.batching.record.sha256
    found.evictions = outcome.scheduler.memory.num_evicted
    found.preemptions = outcome.scheduler.counters.preemptions
    found.rehit_tokens = outcome.scheduler.counters.prefix_rehit_tokens
    return found


def request_differences(found: dict, answer: dict, counts: tuple[str, ...], engine: str) -> Iterator[str]:
    """Where requests differ from an engine's: in times, to 1e-6 s, or in counts."""
    for key, want in answer["requests"].items():
        got = found[key]
        for name in ("first", "finish", *counts):
            a, b = got[name], want.get(name)
            same = abs(a - b) < 1e-6 if isinstance(a, float) and isinstance(b, float) else a == b
            if not same:
                yield f"request {key} {name}: {a} where {engine} has {b}"


def differences(found: Replay, answer: dict, *, stepped: bool = False) -> list[str]:
    """Where the replay differs from vLLM; free blocks are compared where it was `stepped`."""
    for key, want in answer["requests"].items():
        found.requests[key]["loaded"] = found.loaded.get(key, 0)
        want.setdefault("loaded", 0)
    wrong = [*request_differences(found.requests, answer, ("preempted", "hit", "loaded"), "vLLM")]
    for name in ("evictions", "preemptions", "rehit_tokens"):
        if getattr(found, name) != answer[name]:
            wrong.append(f"{name}: {getattr(found, name)} where vLLM has {answer[name]}")
    if found.sha256 != answer["decisions_sha256"]:
        wrong.append(f"decisions: {len(found.lines)} steps where vLLM has {answer['iterations']}")
    if stepped and "steps" in answer:
        if len(found.pools) != len(answer["steps"]):
            wrong.append(f"{len(found.pools)} steps where vLLM has {len(answer['steps'])}")
        for (_, line, free, evictions), pool in zip(answer["steps"], found.pools, strict=False):
            if pool != (free, evictions):
                wrong.append(f"free blocks, evictions: {pool} where vLLM has {free}, {evictions} after {line}")
                break
    return wrong


def first_difference(found: Replay, answer: dict) -> str:
    """The first of the steps in clear that differs."""
    if "lines" in answer:
        for ours, theirs in zip(found.all_lines, answer["lines"], strict=False):
            if ours != theirs:
                start_s = answer["steps"][min(int(theirs.split()[0]), len(answer["steps"]) - 1)][0]
                return f"at {start_s}: {ours} where vLLM has {theirs}"
        return "at the end, or nowhere"
    for step, (_, entries, preempted, hits, free) in enumerate(answer["clear"]):
        line = " ".join(f"{request}:{tokens}" for request, tokens in entries)
        if preempted:
            line += " preempt " + " ".join(map(str, preempted))
        if found.lines[step] != line:
            return f"step {step}: {found.lines[step]} where vLLM has {line} (hits {hits}, {free} free)"
    return beyond_the_clear(found.lines, answer["checkpoints"])


def beyond_the_clear(lines: list[str], checkpoints: list[str]) -> str:
    """Between which of the digests, one after each 100 lines, these lines differ."""
    digest, step = hashlib.sha256(), 0
    for checkpoint in checkpoints:
        for line in lines[step : step + 100]:
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
    lines = [f"{number} {line}" for number, (_, line, *_) in enumerate(answer["steps"])]
    for count, number, line in reversed(answer.get("copies", ())):
        lines.insert(count, f"{number}{line}")
    answer["lines"] = lines
    answer["decisions_sha256"] = hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
    for key, tokens in answer.get("loaded", {}).items():
        answer["requests"][key]["loaded"] = tokens
    return answer


def main() -> None:
    """Compare with every answer in a folder that `make_cases_v1.py` has filled."""
    wrong = found = 0
    for path in sorted(Path(sys.argv[1]).glob("*.json.gz")):
        answer = read_case(path)
        found += 1
        for jump in (True, False):
            try:
                ours = replay(answer, path.parent, jump=jump, checked=not jump)
            except Exception as error:
                wrong += 1
                print(f"{path.name}, jump={jump}: {type(error).__name__}: {error}")
                continue
            if differ := differences(ours, answer, stepped=not jump):
                wrong += 1
                print(f"{path.name}, jump={jump}: {differ[0]}; {first_difference(ours, answer)}")
    print(f"{found} workloads, {wrong} runs of them differ")


if __name__ == "__main__":
    main()
