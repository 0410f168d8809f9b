"""Small random workloads and settings for SGLang's own scheduler, and its answers.

    python make_cases_sglang.py PYTHON ORACLE                   # those that are stored, into `cases_sglang*`
    python make_cases_sglang.py PYTHON ORACLE FOLDER 0 1000     # seeds 0 to 999, for `python sglang_replay.py FOLDER`
    python make_cases_sglang.py PYTHON ORACLE FOLDER 0 40 storing   # or another of `KINDS`

PYTHON is that of an environment with sglang 0.5.23, ORACLE as in `sglang_ask.py`. A seed gives the same case each time.
"""

import gzip
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = HERE / "cases_sglang"
SEEDS = (
    2007, 2012, 2036, 2038, 2041, 2043, 2056, 2058, 2084, 2097, 2098, 10001, 10009, 10031, 10044, 10109,
)  # fmt: skip
DEFERRING_SEEDS = 101, 111, 118, 119, 121
FLAGGED_SEEDS = 204, 208, 213, 215, 226, 232
COPYING = HERE / "cases_sglang_copying"
COPYING_SEEDS = 102, 106, 109, 110, 115, 119, 125, 131, 139
WINDOWED = HERE / "cases_sglang_windowed"
WINDOWED_SEEDS = 20011, 20038, 20101, 20118, 20121, 20131, 20140, 20141, 20152, 20155, 20180, 20184
WINDOWED_COPYING_SEEDS = 71034, 71043, 71045, 71069, 72054, 73018
STATEFUL = HERE / "cases_sglang_stateful"
STATEFUL_SEEDS = 60002, 60005, 60006, 60007, 60008, 60009, 60035, 60044, 60048, 60055, 60060, 60100
STATEFUL_COPYING_SEEDS = 71010, 71035, 71043, 71045, 71056, 71057
STORING_SEEDS = 201, 220, 222, 226, 230
WINDOWED_STORING_SEEDS = 100, 101, 114
STATEFUL_STORING_SEEDS = 6, 7
FLAGGED_STATEFUL_SEEDS = (63002,)
RETURNING_SEEDS = 42004, 42012, 43007, 43013, 43028
COSTS = (
    "0.005,4e-5,2e-9,0.02,2e-5,6e-7",
    # Every step as long: arrivals fall exactly on boundaries.
    "0.015625,0,0,0.015625,0,0",
    "0.001,1e-4,1e-6,0.01,1e-4,2e-5",
)
Row = tuple[float, int, int, list[int], list[int], int]


MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000,
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "is_hybrid_swa": True,
    "hybrid_layer_pattern": [1, 0],
}  # fmt: skip
"""A model of which one layer of two has a window, in a pool of its own (`is_hybrid_swa`)."""
STATES = {
    **{name: value for name, value in MODEL.items() if "hybrid" not in name}, "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next", "full_attention_interval": 2, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 2,
    "num_experts_per_tok": 1, "mlp_only_layers": [0, 1], "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip
"""A model of which one layer of two keeps a state."""


class Workload:
    """One random workload and the settings it runs under."""

    windows: tuple[int, ...] = ()
    """Of these a layer has one."""
    held_windows = 1
    """So many of them the pools hold at least."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(f"kvtwin sglang {seed}")
        choice = dice.choice
        self.page = choice([1, 1, 1, 1, 2, 4, 16, 16, 64])
        self.length = max(choice([40, 64, 100, 200, 200, 400, 400, 1000]), 3 * self.page + 20)
        self.gap = choice([self._burst, self._poisson, self._ticks, lambda: 0.0])
        self.prompts = choice(["any", "short", "long", "mixed"])
        self.outputs = choice(["any", "any", "one", "long"])
        self.is_pressed = dice.random() < 0.4
        """More run than the pool has room for: they are retracted."""
        if self.is_pressed:
            self.length, self.prompts, self.outputs = max(self.length, 200), "short", "long"
        self.naming = choice([self._private, self._shared, self._shared, self._turn, self._turn, self._twin])
        self.priorities = choice([[0], [0, 20], [0, 5, 11, 30], list(range(50))])
        self.window = choice(self.windows) if self.windows else None
        self.num_ids = 1000
        self.stems = [list(range(100 * i, 100 * i + 80)) for i in range(dice.randint(1, 3))]
        self.talks: list[tuple[int, int, list[int], list[int]]] = []
        self.beyond: dict[str, float] = {}
        """Settings that are not the oracle's own (`sglang_ask.py`)."""
        self.told: dict[str, int] = {} if self.window is None else {"window": self.window}
        """What the answer says of the model."""
        self.model = None if self.window is None else {**MODEL, "sliding_window": self.window}

    def _burst(self) -> float:
        return self.dice.choice([0.0, 0.0, 0.0, 0.3])

    def _poisson(self) -> float:
        return self.dice.expovariate(self.dice.choice([5.0, 20.0, 60.0]))

    def _ticks(self) -> float:
        return self.dice.choice([0, 1, 1, 2, 5]) / 64

    def _lengths(self) -> tuple[int, int]:
        dice, most = self.dice, self.length
        prompt = {
            "any": dice.randint(1, most), "short": dice.randint(1, min(40, most)),
            "long": dice.randint(most // 2, most), "mixed": dice.choice([dice.randint(1, 20), dice.randint(1, most)]),
        }[self.prompts]  # fmt: skip
        prompt = max(1, min(prompt, most - 12))
        output = {"any": dice.randint(1, 60), "one": dice.choice([1, 1, 2]), "long": dice.randint(20, 200)}[
            self.outputs
        ]
        return prompt, max(1, min(output, most - prompt - 1))

    def _new(self, count: int) -> list[int]:
        self.num_ids += count
        return list(range(self.num_ids - count, self.num_ids))

    def _named(self, prompt: int, output: int, ids: list[int]) -> tuple[int, int, list[int], list[int]]:
        blocks = -(-prompt // 16)
        own = ids[:blocks] + self._new(max(0, blocks - len(ids)))
        return prompt, output, own, self._new(-(-(prompt + output) // 16) - blocks)

    def _private(self) -> tuple[int, int, list[int], list[int]]:
        return self._named(*self._lengths(), [])

    def _shared(self) -> tuple[int, int, list[int], list[int]]:
        stem = self.dice.choice(self.stems)
        return self._named(*self._lengths(), stem[: self.dice.randint(0, len(stem))])

    def _turn(self) -> tuple[int, int, list[int], list[int]]:
        """Another turn of a conversation, or the first of a new one."""
        prompt, output = self._lengths()
        if self.talks and self.dice.random() < 0.7:
            before, said, ids, answer = self.dice.choice(self.talks)
            known = (ids + answer)[: (before + said) // 16]
            prompt = min(before + said + self.dice.randint(1, 40), self.length - 12)
            output = max(1, min(output, self.length - prompt - 1))
            turn = self._named(prompt, output, known)
        else:
            turn = self._named(prompt, output, self.dice.choice(self.stems)[: self.dice.randint(0, 4)])
        self.talks.append(turn)
        return turn

    def _twin(self) -> tuple[int, int, list[int], list[int]]:
        """The same request again, answer and all, or another."""
        if self.talks and self.dice.random() < 0.5:
            return self.dice.choice(self.talks)
        turn = self._shared()
        self.talks.append(turn)
        return turn

    def rows(self) -> list[Row]:
        now = 0.0
        # The model's end-of-sequence token is the third of the first block: it must be in a prompt.
        found: list[Row] = [(0.0, *self._named(17, 1, []), 0)]
        for _ in range(self.dice.choice([3, 8, 20, 40, 60])):
            now += self.gap()
            found.append((now, *self.naming(), self.dice.choice(self.priorities)))
        return found

    def arguments(self) -> list[str]:
        """Mostly a pool that holds one or a few of the longest requests."""
        dice, page = self.dice, self.page
        choice = dice.choice
        pool = self.length + page + choice([8, 8, 30, 100, 400, 1500] if not self.is_pressed else [100, 200, 400])
        pool = -(-max(pool, self.held_windows * (self.window or 0) + 3 * page) // page) * page
        chunk = choice([-1, 512, page, 2 * page, 16 * -(-page // 16), 64 * -(-page // 64)])
        found = [
            "--pool", pool, "--page", page, "--chunk", chunk, "--cost", choice(COSTS), "--context",
            choice([65536, 65536, self.length + 10]), "--max-running",
            choice([2, 3, 5, 8, 64, 256] if not self.is_pressed else [8, 64, 256]),
            "--max-prefill", choice([16384, 16384, max(32, page), 200]),
            "--conservativeness", choice([1.0, 1.0, 0.3, 0.1, 2.0] if not self.is_pressed else [0.0, 0.1, 0.3]),
        ]  # fmt: skip
        flags = {"--mixed": 0.3 if chunk > 0 else 0.0, "--overlap": 0.5, "--no-radix": 0.15, "--ignore-eos": 0.2}
        found += [flag for flag, share in flags.items() if dice.random() < share]
        if "--ignore-eos" not in found and dice.random() < 0.4:
            found += ["--declared", choice([8, 40, 256, 5000])]
        if dice.random() < 0.25:
            found += ["--priority", "--priority-threshold", choice([0, 10, 10, 20]), *choice([[], ["--low-first"]])]
            found += ["--policy", choice(["fcfs", "lof"])]
        else:
            aware = [] if "--no-radix" in found else ["lpm", "lpm", "dfs-weight"]
            found += ["--policy", choice(["fcfs", "fcfs", "lof", *aware])]
        found += ["--eviction", choice(["lru"] * 8 + ["lfu", "fifo", "mru", "filo", "slru", "priority"])]
        if "--no-radix" not in found and self.window is None and dice.random() < 0.3:
            write = choice(["write_through", "write_through_selective", "write_back"])
            found += ["--hicache", write, "--hicache-ratio", choice([0.5, 1.0, 1.2, 2.0, 4.0])]
        extra: dict[str, object] = {}
        if self.window is not None:
            # A pool of no more than a window and a page is refused.
            least = (self.held_windows * self.window + 2 * page + 1) / pool
            extra["swa_full_tokens_ratio"] = min(1.0, max(choice([0.1, 0.3, 0.5, 0.8, 1.0]), least))
        if dice.random() < 0.1:
            extra["prefill_max_requests"] = dice.randint(1, 3)
        if "--priority" in found and dice.random() < 0.3:
            extra |= choice([{"disable_priority_preemption": True}, {"retraction_policy": "priority"}])
        return list(map(str, [*found, "--extra", json.dumps(extra)]))


class Deferring(Workload):
    """Decodes come first for some steps after each that prefilled."""

    def arguments(self) -> list[str]:
        found, choice = super().arguments(), self.dice.choice
        extra = {"prefill_decode_interval": choice([1, 3, 10, 40])}
        extra["prefill_decode_interval_min_bs"] = choice([0, 0, 2, 5])
        return [*found[:-1], json.dumps(json.loads(found[-1]) | extra)]


class Windowed(Workload):
    """Of a model of which one layer of two has a window, and a pool of its own."""

    windows = (4, 15, 16, 31, 64, 127, 300)


class Stateful(Workload):
    """Of a model of which one layer of two keeps a state."""

    keeps_host = False
    """Whether HiCache is left in."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        chunk = self.dice.choice([16, 16, 64])
        self.told = {"state_chunk": chunk}
        self.model = {**STATES, "mamba_chunk_size": chunk}

    def arguments(self) -> list[str]:
        found, choice = super().arguments(), self.dice.choice
        if "--hicache" in found and not self.keeps_host:
            place = found.index("--hicache")
            del found[place : place + 4]
        is_cached, overlaps = "--no-radix" not in found, "--overlap" in found
        strategies = ["auto", "extra_buffer"] if is_cached else ["auto"]
        if is_cached and not overlaps and self.page == 1:
            strategies += ["no_buffer", "no_buffer"]
        strategy = choice(strategies)
        is_buffered = overlaps or self.page > 1 if strategy == "auto" else strategy == "extra_buffer"
        each = 3 + (1 + overlaps if is_buffered else 0) if is_cached else 1
        size = each * choice([1, 1, 2, 3, 5, 10, 30]) + self.dice.randint(0, each)
        extra = json.loads(found[-1]) | {
            "max_mamba_cache_size": size,
            "mamba_radix_cache_strategy": strategy,
            "mamba_track_interval": choice([-(-least // self.page) * self.page for least in (1, 32, 256)]),
        }
        return [*found[:-1], json.dumps(extra)]


class Copying(Workload):
    """With HiCache, whose copies take time."""

    def arguments(self) -> list[str]:
        found = [argument for argument in super().arguments() if argument != "--no-radix"]
        if "--hicache" not in found:
            write = self.dice.choice(["write_through", "write_through", "write_through_selective", "write_back"])
            found[:0] = ["--hicache", write, "--hicache-ratio", str(self.dice.choice([0.5, 1.0, 1.2, 2.0, 4.0]))]
        self.beyond = {"copy_s": self.dice.choice([2e-5, 2e-4, 1e-3])}
        return found


class WindowedCopying(Copying, Windowed):
    """A window's pages on the host, too: SGLang keeps room for one that it loads beside that of the request."""

    held_windows = 2


class StatefulCopying(Stateful, Copying):
    """States on the host, too."""

    keeps_host = True


class Storing(Copying):
    """With storage behind the host."""

    def arguments(self) -> list[str]:
        found, choice = super().arguments(), self.dice.choice
        extra = json.loads(found[-1])
        config = {
            "prefetch_threshold": choice([1, 16, 16, 64]),
            "prefetch_timeout_base": choice([0.0, 0.01, 1.0]),
            "prefetch_timeout_per_ki_token": choice([0.0, 0.25]),
        }
        extra |= {
            "hicache_storage_backend": "sim",
            "hicache_storage_prefetch_policy": choice(["best_effort", "wait_complete", "timeout", "timeout"]),
            "hicache_storage_prefetch_retry_poll_interval": choice([0, 1, 8]),
            "hicache_storage_prefetch_retry_max_attempts": choice([0, 2, 8]),
            "hicache_storage_backend_extra_config": json.dumps(config),
        }
        found[-1] = json.dumps(extra)
        found[found.index("--hicache-ratio") + 1] = str(choice([0.5, 1.0, 1.2]))
        self.beyond |= {
            "storage_latency_s": choice([1e-4, 2e-3, 0.03]),
            "storage_read_s": choice([1e-6, 1e-4, 1e-3]),
            "storage_write_s": choice([1e-6, 1e-4]),
        }
        return found


class Returning(Storing):
    """The same with a few long prompts that come again and again: the pool and the host hold one or two of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        dice = self.dice
        self.length, self.is_pressed = max(self.length, dice.choice([150, 300, 400])), False
        self.page = dice.choice([1, 1, 4, 16])
        self.few: list[tuple[int, list[int]]] = []
        for i in range(dice.randint(3, 7)):
            tokens = dice.randint(self.length // 3, self.length - 40)
            self.few.append((tokens, [5000 + 100 * i + k for k in range(-(-tokens // 16))]))

    def rows(self) -> list[Row]:
        dice, now = self.dice, 0.0
        found: list[Row] = [(0.0, *self._named(17, 1, []), 0)]
        pause_s = dice.choice([0.0, 0.02, 0.1, 0.3])
        for _ in range(dice.choice([12, 20, 40])):
            now += self.gap() + pause_s * dice.random()
            tokens, ids = dice.choice(self.few)
            tokens = max(8, tokens - dice.choice([0, 0, 1, 17, 40]))
            named = self._named(tokens, dice.randint(1, 30), ids[: -(-tokens // 16)])
            found.append((now, *named, dice.choice(self.priorities)))
        return found


class WindowedStoring(Returning, WindowedCopying):
    """With storage behind the windows, which are short: prompts are longer."""

    windows = (4, 15, 16, 31, 64)


class StatefulStoring(Returning, StatefulCopying):
    """With storage behind the states."""


def flagged(kind: type[Workload]) -> type[Workload]:
    """The same workloads with flags that few set."""

    class Flagged(kind):
        def arguments(self) -> list[str]:
            found, dice = super().arguments(), random.Random(f"flags {self.dice.random()}")
            extra = json.loads(found[-1])
            if not {"--priority", "--no-radix"} & {*found} and dice.random() < 0.6:
                found[found.index("--policy") + 1] = dice.choice(["hrrn", "shortest-prefill-first"])
            if dice.random() < 0.4:
                extra["max_queued_requests"] = dice.choice([1, 3, 8, 20])
            if dice.random() < 0.3:
                extra["min_free_slots_delay"] = dice.choice([1, 2, 3, 8, 1000])
            if dice.random() < 0.3:
                policy = dice.choice(["tlru", "tlru", "slru"])
                estimate = dice.choice([0, 16, 50])
                rules = {"threshold": estimate + dice.choice([1, 16, 100, 1000]), "next_prompt_estimate": estimate}
                extra["radix_eviction_policy_config"] = (
                    rules if policy == "tlru" else {"protected_threshold": dice.choice([1, 3])}
                )
                found[found.index("--eviction") + 1] = policy
            if dice.random() < 0.4:
                extra["scheduler_recv_interval"] = dice.choice([2, 5, 30, 1001, 2500])
            return [*found[:-1], json.dumps(extra)]

    return Flagged


def ask(python: str, oracle: str, folder: Path, seeds: list[int], kind: type[Workload] = Workload) -> None:
    """SGLang's answers to those seeds, compressed, into `folder`."""
    with tempfile.TemporaryDirectory() as made:
        place, jobs, known, settings = Path(made), [], {}, {}
        for seed in seeds:
            workload = kind(seed)
            rows, arguments = workload.rows(), workload.arguments()
            known[seed], settings[seed] = rows, dict(workload.beyond)
            lines = ["arrival_s,prompt_tokens,output_tokens,hash_ids,hash_block_tokens,output_hash_ids,priority"]
            for at, prompt, output, ids, answer, priority in rows:
                names = ",".join((" ".join(map(str, ids)), "16", " ".join(map(str, answer))))
                lines.append(f"{at!r},{prompt},{output},{names},{priority}")
            trace = place / f"{seed:05}.csv"
            trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
            beyond = [word for name, value in workload.beyond.items() for word in (f"--{name}", str(value))]
            if workload.model is not None:
                model = place / "-".join(map(str, *workload.told.items()))
                model.mkdir(exist_ok=True)
                (model / "config.json").write_text(json.dumps(workload.model), encoding="utf-8")
                arguments[-1] = json.dumps({**json.loads(arguments[-1]), "model_path": str(model)})
                settings[seed] |= workload.told
            jobs.append(json.dumps([str(trace), "--out", str(place / f"{seed:05}.json"), *arguments, *beyond]))
        (place / "jobs").write_text("\n".join(jobs) + "\n", encoding="utf-8")
        script = str(HERE / "sglang_ask.py")
        subprocess.run([python, script, oracle, str(place / "jobs")], check=True, stdout=subprocess.DEVNULL)
        folder.mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            answer = place / f"{seed:05}.json"
            if not answer.exists():
                print(f"{seed}: SGLang gives no answer")
                continue
            found = json.loads(answer.read_text(encoding="utf-8"))
            found["workload"] = known[seed]
            found["args"] |= settings[seed]
            extra = json.loads(found["args"]["extra"])
            extra.pop("model_path", None)
            found["args"]["extra"] = json.dumps(extra)
            data = json.dumps(found, separators=(",", ":")).encode()
            (folder / f"{seed:05}.json.gz").write_bytes(gzip.compress(data, mtime=0))


KINDS = {
    "": Workload,
    "deferring": Deferring,
    "copying": Copying,
    "storing": Storing,
    "returning": Returning,
    "windowed": Windowed,
    "stateful": Stateful,
    "windowed-copying": WindowedCopying,
    "stateful-copying": StatefulCopying,
    "windowed-storing": WindowedStoring,
    "stateful-storing": StatefulStoring,
}
KINDS |= {f"flagged {name}".strip(): flagged(kind) for name, kind in KINDS.items()}


def main() -> None:
    python, oracle, *rest = sys.argv[1:]
    if rest:
        seeds = list(range(int(rest[1]), int(rest[2])))
        for begin in range(0, len(seeds), 50):
            ask(python, oracle, Path(rest[0]), seeds[begin : begin + 50], KINDS[" ".join(rest[3:])])
    else:
        ask(python, oracle, CASES, list(SEEDS))
        ask(python, oracle, CASES, list(DEFERRING_SEEDS), Deferring)
        ask(python, oracle, CASES, list(FLAGGED_SEEDS), flagged(Workload))
        ask(python, oracle, COPYING, list(COPYING_SEEDS), Copying)
        ask(python, oracle, WINDOWED, list(WINDOWED_SEEDS), Windowed)
        ask(python, oracle, STATEFUL, list(STATEFUL_SEEDS), Stateful)
        ask(python, oracle, WINDOWED, list(WINDOWED_COPYING_SEEDS), WindowedCopying)
        ask(python, oracle, STATEFUL, list(STATEFUL_COPYING_SEEDS), StatefulCopying)
        ask(python, oracle, COPYING, list(STORING_SEEDS), Storing)
        ask(python, oracle, COPYING, list(RETURNING_SEEDS), Returning)
        ask(python, oracle, WINDOWED, list(WINDOWED_STORING_SEEDS), WindowedStoring)
        ask(python, oracle, STATEFUL, list(STATEFUL_STORING_SEEDS), StatefulStoring)
        ask(python, oracle, STATEFUL, list(FLAGGED_STATEFUL_SEEDS), flagged(Stateful))


if __name__ == "__main__":
    main()
