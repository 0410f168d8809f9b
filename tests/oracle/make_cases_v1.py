"""Make the stored answers of ``cases_v1/``: random workloads and what vLLM 0.33.0's v1 scheduler decides for each.

Needs the environment described in ``vllm_v1_oracle.py``. A seed gives the same case each time::

    python make_cases_v1.py                    # those that are stored
    python make_cases_v1.py FOLDER 1000 2000   # seeds 1000 to 1999, for `python v1_replay.py FOLDER` to compare
    python make_cases_v1.py FOLDER 0 99 -- -offload        # with the OffloadingConnector alone

The stored seeds are the small ones among those on which one rule or another had been wrong here. Workloads for which
vLLM preempts for ever are reported and not stored.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from vllm_v1_offload_oracle import OffloadOptions
from vllm_v1_offload_oracle import ask as ask_offloading
from vllm_v1_oracle import Options, Row, ask, write_answer

CASES = Path(__file__).resolve().parent / "cases_v1"
SEEDS = (
    2, 22, 49, 64, 73, 178, 202, 233, 311, 314, 345, 479, 518, 526, 596, 657, 802, 818, 829, 844, 987, 996, 998,
    1008, 1030, 1060, 1108, 1203, 1205, 1209, 1309, 1318, 1320, 1419, 1430,
)  # fmt: skip

AHEAD = (64, 73, 178, 233, 311, 345, 518, 829, 1030, 1108, 1203, 1209)
"""Of these also the answers with async scheduling, in files `...-async`."""

OFFLOADED = (
    2, 29, 31, 41, 64, 70, 76, 81, 96, 195, 203, 228, 249, 266, 277, 290, 328, 345, 351, 357, 426, 435, 441, 472, 534,
    543, 554, 596, 602, 613, 615, 672, 684, 697, 708, 780, 782, 788, 812, 834,
)  # fmt: skip
"""And with the OffloadingConnector, in files `...-offload`."""

OFFLOADED_AHEAD = (
    3, 24, 38, 1016, 1067, 1234, 1270, 1319, 1353, 1365, 1372, 1403, 1404, 1431, 1452, 2095, 2172, 2277, 2278, 2387,
    2403, 2644, 2671, 2686,
)  # fmt: skip
"""The same with async scheduling, in files `...-offload-async`."""

STORED = (2, 16, 22, 31, 102, 104, 111, 117)
"""And with files behind the host, in files `...-storage`."""

STORED_AHEAD = (2, 8)
"""The same with async scheduling, in files `...-storage-async`."""

WINDOWED = (62, 72, 76, 94, 95, 104, 152, 154, 234, 435, 503, 582)
"""With layers that have a window, in files `...-window`."""

WINDOWED_AHEAD = (1, 80, 94, 105, 186, 210, 211, 218)
"""The same with async scheduling, in files `...-window-async`."""

STATES = (13, 18, 40, 58, 94, 172, 197, 268, 275, 310, 330, 340, 426, 444, 484)
"""With layers that keep a state, in files `...-state`."""

STATES_AHEAD = (23, 38, 94, 172, 275, 288, 321, 330)
"""The same with async scheduling, in files `...-state-async`."""

SPECULATIVE = (2, 5, 1057, 1060, 1064, 1074, 1079, 1090, 1098, 1106, 1126, 1152, 1165, 1179)
"""Where tokens are drafted, in files `...-spec`."""

LORAS = (1, 12, 21, 37)
"""With adapters, in files `...-lora`, of which half are scheduled ahead."""

LORAS_SPECULATIVE = (21, 22)
"""The same where tokens are drafted, in files `...-lora-spec`."""

LORAS_OFFLOADED = (11, 38)
"""And with the OffloadingConnector, in files `...-lora-offload`, of which half are scheduled ahead."""

IMAGES = (106, 136, 142)
"""Where prompts have images, in files `...-images`."""

IMAGES_AHEAD = (106, 123, 142)
"""The same with async scheduling, in files `...-images-async`."""

STAGES = (129, 139, 180, 202, 215)
"""On pipelines, in files `...-stages`."""

STAGES_AHEAD = (1, 117, 180, 201, 203)
"""The same with async scheduling, in files `...-stages-async`."""

STAGES_WINDOWED = (65003, 65044)
STAGES_STATES = (66001, 66002)
"""The same with layers that have a window or keep a state, in files `...-stages-window` and `...-stages-state`."""

BLOCK = 16
TICK = 1 / 64
COSTS = (
    (0.005, 4e-5, 2e-9, 0.02, 2e-5, 6e-7),
    # Every step as long: arrivals fall exactly on boundaries.
    (TICK, 0.0, 0.0, TICK, 0.0, 0.0),
    (0.0, 4e-5, 0.0, 0.0, 2e-4, 0.0),
    (0.001, 1e-4, 1e-6, 0.01, 1e-4, 2e-5),
)


class Workload:
    """One random workload and the settings it runs under."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"kvtwin v1 {seed}")
        choice = self.dice.choice
        self.length = choice([48, 64, 100, 128, 256, 256, 512])
        self.gap = choice([self._burst, self._poisson, self._ticks, lambda: 0.0])
        self.prompts = choice(["any", "blocks", "short", "mixed"])
        self.outputs = choice(["any", "one", "long", "mixed"])
        self.naming: Callable[[int, int], tuple[int, int, list[int], list[int]]] = choice(
            [self._private, self._shared, self._shared, self._turn, self._turn, self._tree]
        )
        self.num_ids = 1000
        self.stems = [list(range(50 * i, 50 * i + 64)) for i in range(self.dice.randint(1, 3))]
        self.talks: list[tuple[int, int, list[int], list[int]]] = []
        self.album_dice = random.Random(f"kvtwin v1 images {seed}")
        self.sizes: list[int] = []

    def options(self) -> Options:
        """Mostly just enough blocks for the longest request, seats and budgets from one to plenty."""
        dice = self.dice
        seats = dice.choice([1, 2, 3, 5, 8, 8, 16, 64])
        threshold = min(self.length, dice.choice([0, 0, 0, 1, 5, 16, 17, 32, 50]))
        return Options(
            blocks=-(-self.length // BLOCK) + 1 + dice.choice([0, 0, 1, 2, 5, 10, 20, 60]),
            max_model_len=self.length,
            max_num_seqs=seats,
            max_batched=max(seats, dice.choice([8, 16, 17, 32, 40, 64, 100, 256, 512, 2048])),
            no_prefix_caching=dice.random() < 0.15,
            policy=dice.choice(["fcfs", "fcfs", "priority"]),
            long_prefill=threshold,
            long_prefill_adaptive=threshold > 0 and dice.random() < 0.4,
            watermark=dice.choice([0.0, 0.0, 0.0, 0.01, 0.1, 0.3]),
            no_reserve_full_isl=dice.random() < 0.4,
            cost=dice.choice(COSTS),
        )

    def offload_options(self) -> OffloadOptions:
        """A host that holds little or all of it, copies from none to long, and slower in one direction."""
        dice = self.dice
        options = self.options()
        return OffloadOptions(
            **asdict(options),
            cpu_chunks=dice.choice([1, 3, 10, 20, 40, 100, 1000]),
            blocks_per_chunk=dice.choice([1, 1, 1, 2, 3, 4]),
            load_s_per_block=dice.choice([0.0, 1e-4, 1e-4, 1e-3, TICK, 0.05]),
            store_s_per_block=dice.choice([0.0, 1e-4, 1e-4, 1e-3, TICK, 0.05]),
            eviction_policy=dice.choice(["lru", "lru", "arc"]),
            store_threshold=dice.choice([0, 0, 0, 1, 2, 3]),
            offload_outputs=dice.random() < 0.4,
        )

    def storage_options(self) -> OffloadOptions:
        """The same with files behind a host that seldom holds all."""
        options, dice = self.offload_options(), self.dice
        return replace(
            options,
            cpu_chunks=dice.choice([1, 3, 5, 10, 20, 40, 100]),
            store_threshold=0,
            storage=True,
            storage_read_s_per_block=dice.choice([1e-4, 1e-4, 1e-3, TICK, 0.05]),
            storage_write_s_per_block=dice.choice([1e-4, 1e-4, 1e-3, TICK, 0.05]),
        )

    def window_options(self, *, async_scheduling: bool) -> Options:
        """Layers of which some or all have a window, from one token to more than any request has."""
        dice = self.dice
        options = self.options()
        num_full = dice.choice([0, 1, 1, 1, 1, 2])
        num_window = dice.choice([1, 1, 2, 3])
        return replace(
            options,
            blocks=(options.blocks - 1) * (num_full + num_window) + 1,
            async_scheduling=async_scheduling,
            window=dice.choice([1, 2, 16, 17, 18, 32, 33, 48, 100, 1000]),
            num_full=num_full,
            num_window=num_window,
            window_first=num_full > 0 and dice.random() < 0.5,
        )

    def state_options(self, *, async_scheduling: bool) -> Options:
        """Layers of which some keep a state, which kernels write out amid a chunk, or do not."""
        dice = self.dice
        options = self.options()
        num_state = dice.choice([1, 2, 3, 3])
        return replace(
            options,
            # Chunks of prompts that are scheduled together need a state more each.
            blocks=(options.blocks + dice.choice([0, 1, 2, 4])) * (1 + num_state) + 1,
            async_scheduling=async_scheduling,
            num_state=num_state,
            exports_states=dice.random() < 0.5,
        )

    def spec_options(self) -> Options:
        """One to eight tokens drafted, of which none, some or all are accepted."""
        dice = self.dice
        options, tokens = self.options(), dice.choice([1, 1, 2, 3, 5, 8])
        rate = dice.choice([0.0, 0.3, 0.7, 0.9, 1.0])
        return replace(
            options,
            # vLLM fails where a threshold cuts a padded decode; and needs room for one token and what is ahead of it.
            long_prefill=options.long_prefill if options.long_prefill > tokens else 0,
            long_prefill_adaptive=options.long_prefill_adaptive and options.long_prefill > tokens,
            max_batched=max(options.max_batched, tokens + 1),
            spec_method=dice.choice(["ngram", "draft_model", "eagle", "mtp"]),
            spec_tokens=tokens,
            acceptance=tuple(rate * dice.choice([1.0, 0.8]) ** i for i in range(tokens)),
            acceptance_seed=dice.randrange(1000),
        )

    def stage_options(self, options: Options) -> Options:
        """The same on two to four stages."""
        return replace(options, stages=self.dice.choice([2, 2, 3, 4]))

    def lora_options(self, options: Options) -> Options:
        """The same where one to three adapters run at once, perhaps scheduled ahead."""
        dice = self.dice
        ahead = options.async_scheduling or (not options.spec_method and dice.random() < 0.5)
        return replace(options, max_loras=dice.choice([1, 1, 2, 3]), async_scheduling=ahead)

    def lora_rows(self) -> list[Row]:
        """Rows of which some or all have one of a few adapters."""
        dice = self.dice
        without, most = dice.choice([0.0, 0.2, 0.7]), dice.choice([1, 2, 3, 5, 9])
        return [row._replace(lora=0 if dice.random() < without else dice.randint(1, most)) for row in self.rows()]

    def image_options(self, *, async_scheduling: bool) -> Options:
        """Images from a token to most of a prompt; the encoder's budget and cache hold the largest, or many."""
        dice, options = self.album_dice, replace(self.options(), async_scheduling=async_scheduling)
        sizes = [1, 5, 16, 16, 20, 32, 48]
        self.sizes = [min(dice.choice(sizes), self.length // 2) for _ in range(dice.randint(1, 6))]
        largest = max(self.sizes) + dice.choice([0, 0, 0, 7, 40])
        # vLLM does not start, or waits for ever, where an image that may not be split is too long for a step.
        whole = dice.random() < 0.4 and largest <= options.max_batched
        return replace(
            options,
            max_tokens_per_image=largest,
            whole_images=whole,
            long_prefill=0 if whole and options.long_prefill < largest else options.long_prefill,
            long_prefill_adaptive=options.long_prefill_adaptive and not (whole and options.long_prefill < largest),
            encoder_s_per_token=dice.choice([0.0, 1e-4, 1e-3]),
        )

    def rows_with_images(self) -> list[Row]:
        """The same requests, of whose prompts most have one of a few rows of images, as far as these fit."""
        dice, albums = self.album_dice, []
        for _ in range(dice.randint(1, 3)):
            album, end = [], 0
            while end < self.length:
                ident = dice.randrange(len(self.sizes))
                album.append((end + dice.choice([0, 0, 1, 3, 16, 30]), self.sizes[ident], ident))
                end = sum(album[-1][:2])
            albums.append(album)
        rows = []
        for row in self.rows():
            album = dice.choice([*albums, *albums, []])
            rows.append(row._replace(images=[one for one in album if sum(one[:2]) <= row.prompt_tokens]))
        return rows

    def rows(self) -> list[Row]:
        """The requests, by arrival."""
        rows, now = [], 0.0
        for _ in range(self.dice.choice([4, 8, 15, 30, 50])):
            now += self.gap()
            prompt, output, ids, output_ids = self.naming(max(1, self._prompt()), self._output())
            rows.append(Row(now, prompt, output, ids, output_ids, self.dice.choice([0, 0, 1, 2, 5, -1])))
        return rows

    # -- when --------------------------------------------------------------------------------------------------------

    def _burst(self) -> float:
        return self.dice.choice([0.0, 0.0, 0.0, 0.0, 0.3])

    def _poisson(self) -> float:
        return self.dice.expovariate(self.dice.choice([2, 10, 50]))

    def _ticks(self) -> float:
        return self.dice.randint(0, 6) * TICK

    # -- how long ----------------------------------------------------------------------------------------------------

    def _prompt(self) -> int:
        dice, kind = self.dice, self.prompts
        if kind == "mixed":
            kind = dice.choice(["any", "blocks", "short"])
        if dice.random() < 0.03:
            # Around what is refused.
            return self.length + dice.randint(-2, 2)
        if kind == "any":
            return dice.randint(1, int(self.length * 0.8))
        if kind == "blocks":
            return BLOCK * dice.randint(1, max(1, self.length // BLOCK - 1)) + dice.choice([0, 0, 0, 0, 1, -1])
        return dice.randint(1, min(40, self.length - 1))

    def _output(self) -> int:
        dice, kind = self.dice, self.outputs
        if kind == "mixed":
            kind = dice.choice(["any", "one", "long"])
        if kind == "one":
            return dice.choice([1, 1, 1, 2, 3])
        return dice.randint(1, 40) if kind == "any" else dice.randint(20, self.length)

    # -- what is in it: (prompt tokens, output tokens, ids of the prompt, of the output) -----------------------------

    def _new(self) -> int:
        self.num_ids += 1
        return self.num_ids

    def _private(self, prompt: int, output: int) -> tuple[int, int, list[int], list[int]]:
        return prompt, output, [], []

    def _cut(self, prompt: int, output: int, ids: list[int]) -> tuple[int, int, list[int], list[int]]:
        """The ids of all its blocks, parted after the prompt."""
        at, most = -(-prompt // BLOCK), -(-(prompt + output) // BLOCK)
        ids = ids[:most] + [self._new() for _ in range(most - len(ids))]
        return prompt, output, ids[:at], ids[at:]

    def _shared(self, prompt: int, output: int) -> tuple[int, int, list[int], list[int]]:
        """One of a few beginnings, for a few blocks or as far as it goes; perhaps what is generated, too."""
        dice = self.dice
        if dice.random() < 0.15:
            return self._private(prompt, output)
        _, _, ids, output_ids = self._cut(prompt, output, dice.choice(self.stems)[: dice.choice([0, 1, 2, 3, 100])])
        if dice.random() < 0.2:
            ids = ids[: prompt // BLOCK]
        return prompt, output, ids, output_ids if dice.random() < 0.6 else []

    def _tree(self, prompt: int, output: int) -> tuple[int, int, list[int], list[int]]:
        """Prefixes that part at every block, or do not."""
        flips = [self.dice.randrange(2) for _ in range(-(-(prompt + output) // BLOCK))]
        _, _, ids, output_ids = self._cut(prompt, output, flips)
        return prompt, output, ids, output_ids[: self.dice.choice([0, 1, 100])]

    def _turn(self, prompt: int, output: int) -> tuple[int, int, list[int], list[int]]:
        """The first turn of a conversation, or a later one, or one that came before, again."""
        dice = self.dice
        kind = dice.random() if self.talks else 1.0
        if kind > 0.6:
            stem = dice.choice(self.stems)[: dice.choice([0, 1, 2])]
            turn = self._cut(prompt, output, stem)
        else:
            before, generated, ids, output_ids = turn = dice.choice(self.talks)
            if 0.15 < kind <= 0.25:
                turn = before, output, ids, []
            elif kind > 0.25:
                prompt = before + generated + dice.choice([0, dice.randint(1, 40), dice.randint(1, 40)])
                if prompt >= self.length:
                    prompt = dice.randint(1, self.length - 1)
                kept = (ids + output_ids)[: (before + generated) // BLOCK]
                turn = self._cut(prompt, output, kept if dice.random() < 0.8 else ids + output_ids)
        self.talks.append(turn)
        return turn


Kind = Literal[
    "", "-async", "-offload", "-offload-async", "-storage", "-storage-async", "-window", "-window-async", "-state",
    "-state-async", "-spec", "-lora", "-lora-spec", "-lora-offload", "-images", "-images-async", "-stages",
    "-stages-async", "-stages-window", "-stages-state",
]  # fmt: skip


def make(seed: int, folder: Path, kind: Kind = "") -> str:
    """Ask vLLM about one seed and store the answer; what to say of it."""
    workload = Workload(seed)
    try:
        if kind.startswith("-lora"):
            kinds = {"-lora": workload.options, "-lora-spec": workload.spec_options}
            options = workload.lora_options(kinds.get(kind, workload.offload_options)())
            rows = workload.lora_rows()
            answer = ask_offloading(rows, options) if isinstance(options, OffloadOptions) else ask(rows, options)
        elif kind.startswith("-offload"):
            offloading, rows = workload.offload_options(), workload.rows()
            answer = ask_offloading(rows, replace(offloading, async_scheduling=kind == "-offload-async"))
        elif kind.startswith("-storage"):
            offloading, rows = workload.storage_options(), workload.rows()
            answer = ask_offloading(rows, replace(offloading, async_scheduling=kind == "-storage-async"))
        elif kind.startswith("-window"):
            options, rows = workload.window_options(async_scheduling=kind == "-window-async"), workload.rows()
            answer = ask(rows, options)
        elif kind.startswith("-stages"):
            if kind in ("-stages", "-stages-async"):
                options = replace(workload.options(), async_scheduling=kind == "-stages-async")
            else:
                drawn = workload.window_options if kind == "-stages-window" else workload.state_options
                options = drawn(async_scheduling=seed % 2 == 0)
            options, rows = workload.stage_options(options), workload.rows()
            answer = ask(rows, options)
        elif kind.startswith("-images"):
            options = workload.image_options(async_scheduling=kind == "-images-async")
            answer = ask(rows := workload.rows_with_images(), options)
        elif kind == "-spec":
            options, rows = workload.spec_options(), workload.rows()
            answer = ask(rows, options)
        elif kind.startswith("-state"):
            options, rows = workload.state_options(async_scheduling=kind == "-state-async"), workload.rows()
            answer = ask(rows, options)
        else:
            options, rows = replace(workload.options(), async_scheduling=kind == "-async"), workload.rows()
            answer = ask(rows, options)
    except RuntimeError as error:
        return f"{seed}: not stored, {error}"
    size = write_answer({"seed": seed, **answer}, folder / f"{seed:05d}{kind}.json.gz")
    counts = ", ".join(f"{answer[key]} {key}" for key in ("iterations", "preemptions", "evictions", "rehit_tokens"))
    return f"{seed}: {len(rows)} requests, {counts}, {size} bytes"


def main() -> None:
    """Make the stored cases, or those named on the command line."""
    given: dict[Kind, Iterable[int]] = {
        "": SEEDS, "-async": AHEAD, "-offload": OFFLOADED, "-offload-async": OFFLOADED_AHEAD, "-storage": STORED,
        "-storage-async": STORED_AHEAD, "-window": WINDOWED, "-window-async": WINDOWED_AHEAD, "-state": STATES,
        "-state-async": STATES_AHEAD, "-spec": SPECULATIVE, "-lora": LORAS, "-lora-spec": LORAS_SPECULATIVE,
        "-lora-offload": LORAS_OFFLOADED, "-images": IMAGES, "-images-async": IMAGES_AHEAD,
        "-stages": STAGES, "-stages-async": STAGES_AHEAD, "-stages-window": STAGES_WINDOWED,
        "-stages-state": STAGES_STATES,
    }  # fmt: skip
    folder = CASES
    if sys.argv[1:]:
        folder = Path(sys.argv[1])
        seeds = range(int(sys.argv[2]), int(sys.argv[3]))
        given = {kind: seeds for kind in given if not sys.argv[5:] or kind in sys.argv[5:]}
    folder.mkdir(exist_ok=True)
    for kind, seeds in given.items():
        for seed in seeds:
            print(make(seed, folder, kind), flush=True)


if __name__ == "__main__":
    main()
