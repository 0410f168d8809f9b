"""Prices of plans as they are pinned: every copy beside, behind, between and around computations of all forms."""

import tempfile
from collections.abc import Iterator
from functools import cache
from math import inf
from pathlib import Path
from random import Random

import msgspec
from goldens import GOLDEN, digest, rounded
from test_calib_llmservingsim import write_kernels

from calib.importers.llmservingsim import import_tables
from sim.cost.engine_profile import load_engine_profile
from sim.cost.forms import build_cost
from sim.cost.model import CostModel
from sim.cost.pricing import Lanes, Pricer
from sim.cost.profile import Profile, linear_profile, load_profile, read_profile
from sim.engine.changes import DISK, GPU, HOST, Move, Projected, Rebuilt, Restore, Streamed, Uncache
from sim.engine.plan import ADMITTED, CONTINUED, IterationPlan, WindowTokens
from sim.engine.sequence import Sequence
from sim.specs.hardware import load_hardware
from sim.specs.models import ModelSpec, load_model
from traces.request import Request

BLOCK_BYTES, BLOCK_TOKENS = 2.0**21, 16
LINEAR = (4e-3, 1e-4, 2e-8, 6e-3, 2e-4, 3e-7, 5e-4, 2e-5)


@cache
def table_profile(tp: int, mixed: bool = True) -> Profile:
    """Kernels of a small folder, with or without passes of both kinds; beyond them a roofline."""
    with tempfile.TemporaryDirectory() as folder:
        write_kernels(Path(folder))
        kernels = import_tables(Path(folder), "llama-3.1-8b", tp)
    if not mixed:
        rows = [row for row in kernels.attention if not (row[0] and row[2])]
        kernels = msgspec.structs.replace(kernels, attention=rows)
    return msgspec.structs.replace(load_profile("h100-imported"), form="table", kernels=kernels)


def machines() -> Iterator[tuple[str, CostModel, ModelSpec]]:
    """Costs of all forms by name, and of which model."""
    golden = {name: read_profile(GOLDEN / f"{name}-profile.json") for name in ("l20", "t4")}
    llama, grouped = load_model("llama-2-7b"), load_model("llama-3.1-8b")
    l20, t4, h100, cpu = (load_hardware(name) for name in ("l20", "t4", "h100", "cpu"))
    engines = {name: load_engine_profile(name) for name in ("vllm-0.5", "vllm-v1-async", "kvtwin")}
    for name in ("llama-2-7b", "gemma-2-9b", "deepseek-v2-lite", "mixtral-8x7b-v0.1"):
        model = load_model(name)
        for tp in (1, 2):
            yield f"{name} on {tp} l20", build_cost(model, l20, golden["l20"], tp, BLOCK_BYTES), model
    yield "t4, serial host", build_cost(llama, t4, golden["t4"], 2, BLOCK_BYTES, engine=engines["vllm-0.5"]), llama
    hidden = engines["vllm-v1-async"]
    yield "l20, hidden host", build_cost(llama, l20, golden["l20"], 1, BLOCK_BYTES, engine=hidden), llama
    quantised = llama.with_quantization("fp8")
    yield "h100, FP8", build_cost(quantised, h100, load_profile("h100-imported"), 4, BLOCK_BYTES), quantised
    for tp in (1, 2):
        cost = build_cost(grouped, h100, table_profile(tp), tp, BLOCK_BYTES, engine=hidden)
        yield f"table of {tp}", cost, grouped
        yield (
            f"table of {tp}, nothing mixed",
            build_cost(grouped, h100, table_profile(tp, False), tp, BLOCK_BYTES),
            grouped,
        )
    yield "paper", build_cost(llama, l20, golden["l20"], 1, BLOCK_BYTES, "paper"), llama
    profile = linear_profile("line", LINEAR, "tests")
    yield "line", build_cost(llama, l20, profile, 1, BLOCK_BYTES), llama
    windows = load_model("gemma-2-9b")
    yield "line, windows", build_cost(windows, l20, profile, 1, BLOCK_BYTES), windows
    yield "line on a CPU", build_cost(llama, cpu, profile, 1, BLOCK_BYTES), llama


class Plans:
    """Plans of everything that moves, drawn with a seed."""

    def __init__(self, draw: Random, model: ModelSpec, groups: int) -> None:
        self.draw, self.layers, self.groups = draw, model.num_layers, groups
        self.window = model.kv_format().window

    def sequence(self, tokens: int) -> Sequence:
        return Sequence(Request(0, 0.0, tokens, 50))

    def move(self, out: bool, disk: bool = False) -> Move:
        draw = self.draw
        ends = ((HOST, DISK) if disk else (GPU, HOST))[:: 1 if out else -1]
        each_s = draw.choice((None, None, 0.002)) if not disk else 0.003
        blocks = draw.choice((1, 3, 40, 700))
        return Move(self.sequence(64), (0,), 0, 64, *ends, blocks, 0, draw.random() < 0.7, each_s)

    def streamed(self) -> tuple[Streamed | Projected | Rebuilt, ...]:
        draw, read, written = self.draw, self.draw.choice((0, 20, 900)), self.draw.choice((0, 2, 300))
        kind = draw.randrange(4)
        if kind == 0:
            return (Streamed(2, read, written), Streamed(1, 30, 0))
        if kind == 1:
            return (Streamed(2, 5, 1), Projected(self.groups // 2 or 1, read, written, 500, 1))
        loss, overlapped = draw.choice((None, 1.0, 1.3)), draw.random() < 0.7
        seq = self.sequence(300)
        after = (Uncache(seq, 160, draw.randrange(4), (1,), 3),) if draw.random() < 0.6 and self.groups > 1 else ()
        again = tuple(range(draw.choice((1, self.layers // 2))))
        return (Rebuilt(0, read, written, ((seq, 160), (seq, 48)), again, loss, overlapped, after),)

    def plan(self) -> IterationPlan:
        """One iteration."""
        draw, plan = self.draw, IterationPlan()
        for _ in range(draw.choice((0, 0, 1, 2))):
            cached, new = draw.choice((0, 0, 16, 900)), draw.choice((1, 17, 300, 2500))
            seq = self.sequence(cached + new + draw.choice((0, 0, 50)))
            seq.num_computed = cached
            plan.add_chunk(seq, new, draw.choice((ADMITTED, CONTINUED)))
        if draw.random() < 0.15:
            seq = self.sequence(40)
            seq.num_computed = 41
            plan.add_single_chunk(seq, CONTINUED)
        if draw.random() < 0.7 or not plan.chunks:
            self.decodes(plan)
        for out, name in ((True, "swapped_out_blocks"), (False, "swapped_in_blocks")):
            if draw.random() < 0.2:
                setattr(plan, name, draw.choice((1, 9, 300)))
                plan.changes += (self.move(out),)
        if draw.random() < 0.2:
            kept = draw.choice((0, self.groups // 2))
            seq, rest = self.sequence(64), tuple(range(kept, self.groups))
            plan.mixed_restores = (Restore(seq, 64, rest, tuple(range(kept)), (), 4 * kept),)
        if draw.random() < 0.4:
            plan.beside = tuple(self.move(draw.random() < 0.5, draw.random() < 0.3) for _ in range(draw.choice((1, 2))))
            if draw.random() < 0.4:
                plan.awaited = plan.beside[:1]
        if draw.random() < 0.2:
            plan.after = tuple(self.move(draw.random() < 0.5) for _ in range(draw.choice((1, 2))))
        if draw.random() < 0.25:
            plan.streamed = self.streamed()
        if plan.chunks and draw.random() < 0.4:
            plan.behind = self.move(True), self.move(True)
            plan.behind_groups, plan.behind_blocks = (
                draw.choice((1, self.layers // 2, self.layers)),
                draw.choice((4, 900)),
            )
        plan.lookup_s = draw.choice((0.0, 0.0, 3e-4))
        return plan

    def decodes(self, plan: IterationPlan) -> IterationPlan:
        """With decodes of unlike contexts, some of them read together."""
        draw = self.draw
        plan.num_decodes = draw.choice((1, 7, 64, 300))
        plan.decode_context_tokens += plan.num_decodes * draw.choice((5, 130, 1500, 9000))
        plan.decode_longest_tokens = draw.choice((0, plan.decode_context_tokens // plan.num_decodes * 2))
        plan.decode_shared_tokens = draw.choice((0, 0, plan.decode_context_tokens // 3))
        if self.window is not None:
            plan.decode_window = WindowTokens(plan.decode_context_tokens // 2, plan.num_decodes // 2)
        return plan

    def run(self) -> IterationPlan:
        """Many decodes alike, with or without what streams."""
        plan = self.decodes(IterationPlan())
        plan.max_steps = self.draw.choice((1, 2, 7, 40))
        plan.lookup_s = self.draw.choice((0.0, 3e-4))
        if self.draw.random() < 0.4:
            plan.streamed = self.streamed()
        return plan


class Instance:
    """A pricer of its own, what it said of ends, and what its plans took."""

    def __init__(self, cost: CostModel, plans: Plans, *, keep_intervals: bool) -> None:
        self.plans, self.ends, self.known = plans, [], {}
        self.lanes = Lanes(keep_intervals=keep_intervals)
        self.pricer = Pricer(
            cost, self.lanes, self.finish_at, layers=plans.layers, num_groups=plans.groups, block_bytes=BLOCK_BYTES,
            hidden_bytes=4096.0, ends_at=lambda moves: max(self.known.get(id(move), 0.0) for move in moves),
        )  # fmt: skip

    def finish_at(self, end_s: float, move: Move) -> None:
        self.ends.append((end_s, move.num_blocks))
        self.known[id(move)] = end_s

    def prices(self) -> Iterator[object]:
        """Of a few iterations and runs that follow one another, at once or after a pause."""
        draw, now_s = self.plans.draw, 0.0
        for _ in range(5):
            if draw.random() < 0.7:
                times = self.pricer.step(self.plans.plan(), now_s)
            else:
                until_s = now_s + draw.choice((0.0, 0.05, 3.0, inf))
                times = self.pricer.run(self.plans.run(), now_s, until_s, draw.choice((0, 1)))
            now_s = times.end_s + draw.choice((0.0, 0.0, 0.01))
            yield list(times)
        yield self.pricer.started_s

    def stand(self) -> Iterator[object]:
        """Of every lane."""
        lanes = self.lanes
        for lane in (lanes.compute, lanes.h2d, lanes.d2h, lanes.host, lanes.disk_read, lanes.disk_write):
            yield lane.free_s, lane.busy_s, list(lane.intervals or ())


def priced() -> Iterator[str]:
    """Times of iterations and of runs, what ends when, and where the lanes stand."""
    for label, cost, model in machines():
        for groups in (1, model.num_layers):
            found = []
            for seed in range(20):
                plans = Plans(Random(f"{groups} {seed}"), model, groups)
                instance = Instance(cost, plans, keep_intervals=seed % 2 == 0)
                times = list(instance.prices())
                found.append((times, instance.ends, list(instance.stand())))
            digests = " ".join(map(digest, zip(*found, strict=True)))
            yield f"{label}, {groups} groups: {rounded(sum(times[-2][4] for times, *_ in found))} {digests}"
        yield f"{label}: beyond {rounded(cost.beyond)}"


PINNED = {"plans": priced}
