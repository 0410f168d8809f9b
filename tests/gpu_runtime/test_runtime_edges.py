"""Small duties of the live half: what it starts from, what it leaves, and what its checks find out."""
# ruff: noqa: E402 (torch may be absent)

import gzip
import json
import signal
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("psutil")

from runtime_variants import policy_of

import kvtwin
from gpu_runtime import live
from gpu_runtime.executed import Executed, Moved
from gpu_runtime.kv.copy_worker import CopyFailed, CopyHandle, CopyWorker
from gpu_runtime.model.weights import RandomWeights
from gpu_runtime.serve import run
from gpu_runtime.turn_states import StateBlocks
from gpu_runtime.twin import figure, validate
from kvtwin.testing.live import SMALL, small_decoder
from sim.engine.changes import Direction, Move, Projected, Rebuilt, Restore, Streamed, Tier
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from sim.prepare import prepare
from sim.runs import Recording
from sim.scenario import Scenario
from traces.request import Request


@pytest.mark.parametrize("fields", [{}, {"qkv_bias": True, "qk_norm": True}])
def test_random_weights_are_those_of_their_seed(fields):
    """The generator of layer i begins at 10,007 times the seed plus i + 1, that of both ends at the seed's own."""
    config = msgspec.structs.replace(SMALL, **fields)
    made = RandomWeights(config, "cpu", torch.float32, 3)
    for index in (0, 2):
        noise = torch.Generator().manual_seed(30_021 + index + 1)
        layer = made.layer(index)
        expected = {"qkv": (96 + 2 * 32, 48, 48**-0.5)}
        if fields:
            expected["qkv_bias"] = (96 + 2 * 32, None, 0.1)
        # Of four layers: what goes to the residual stream is smaller by the root of eight.
        expected |= {"output": (48, 96, (8 * 96) ** -0.5), "gate_up": (160, 48, 48**-0.5)}
        expected |= {"down": (48, 80, (8 * 80) ** -0.5)}
        for name, (rows, columns, std) in expected.items():
            shape = (rows,) if columns is None else (rows, columns)
            assert torch.equal(getattr(layer, name), torch.empty(shape).normal_(0.0, std, generator=noise)), name
        norms = {"input_norm": 48, "post_norm": 48} | ({"q_norm": 16, "k_norm": 16} if fields else {})
        for name, size in norms.items():
            assert torch.equal(getattr(layer, name), torch.ones(size))
    noise = torch.Generator().manual_seed(30_021)
    head = torch.empty(101, 48).normal_(0.0, 48**-0.5, generator=noise)
    ends = made.ends()
    assert torch.equal(ends.head, head)
    assert torch.equal(ends.embedding, torch.empty(101, 48).normal_(0.0, 1.0, generator=noise))
    assert torch.equal(ends.final_norm, torch.ones(48))


def test_the_small_decoder_is_always_the_same():
    layer = RandomWeights(SMALL, "cpu", torch.float32, 3).layer(1)
    weights = [value for value in vars(small_decoder().layers[1]).values() if hasattr(value, "qkv")]
    assert weights and all(torch.equal(value.qkv, layer.qkv) for value in weights)


def test_state_blocks_that_are_listed_free_twice_are_found_out():
    blocks = StateBlocks(4, 2)
    blocks.renew([0, 1])
    blocks.check([])
    kept = blocks.of[:1].tolist()
    blocks.ids.share(kept)
    blocks.check(kept)
    for wrong in ([], kept * 2, [5]):
        with pytest.raises(InvariantError, match="users, not"):
            blocks.check(wrong)
    blocks.ids._free.append(blocks.ids._free[0])
    with pytest.raises(InvariantError, match="listed free"):
        blocks.check(kept)


def test_a_crash_that_is_over_leaves_no_word(tmp_path, monkeypatch):
    parts = SimpleNamespace(scheduler=None, engine=None, lanes=None, series=None)
    monkeypatch.setattr(run, "build_engine", lambda *_: parts)
    monkeypatch.setattr(run, "build_device", lambda *_: SimpleNamespace(decoder=None))
    monkeypatch.setattr(run, "EngineThread", lambda *_: SimpleNamespace(error=None, instance=None))
    monkeypatch.setattr(run, "describe_machine", lambda _: None)
    monkeypatch.setattr(run, "serve", lambda *_: None)
    monkeypatch.setattr(run.asyncio, "run", lambda _: False)
    setup = SimpleNamespace(scenario=SimpleNamespace(kv_cache_dtype="auto"))
    (tmp_path / "crash.txt").write_text("of a run before")
    done = run.perform(setup, None, None, None, None, None, None, None, folder=tmp_path, announce=print)
    assert not list(tmp_path.iterdir())
    assert (done.backend, done.interrupted, done.error) == ("kvtwin-live", False, None)


def test_an_interrupt_is_python_s_to_handle_again(monkeypatch):
    """The first one ends the run and keeps what is finished; another ends the process while its files are written."""
    ended, scenario = [], Scenario(gpu="cpu", workload="fixed", num_prompts=2, input_len=9, output_len=4)

    def interrupted(instance):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    device = SimpleNamespace(
        memory=SimpleNamespace(engine=SimpleNamespace(spans=SimpleNamespace(take=list))),
        warm_up=lambda: ended.append("warm"),
        start=lambda: ended.append("started"),
        close=lambda: ended.append("closed"),
    )
    monkeypatch.setattr(live, "build_device", lambda *_: device)
    monkeypatch.setattr(live.LiveInstance, "serve", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        setup = prepare(scenario, "vllm-recompute", policy_of("vllm-recompute"))
        run = live.perform(setup, [], None, Recording(), small_decoder(), live.LiveOptions("cpu"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.interrupted and ended == ["warm", "started", "closed"]


def panel(*series):
    """The panel of KV blocks of a simulated run and live ones, with their time series."""
    axes = figure.new_figure(4.0, 3.0).subplots()
    simulated, *executed = (SimpleNamespace(series=one) for one in series)
    figure._draw_memory(axes, simulated, executed)
    return axes


def test_runs_without_a_time_series_have_no_line():
    names = ("time_s", "gpu_free_blocks", "gpu_allocated_blocks", "gpu_released_blocks")
    full = dict(
        zip(names, map(np.array, ([0.0, 1.0, 2.0], [6.0, 2.0, 0.0], [2.0, 6.0, 0.0], [0.0, 0.0, 0.0])), strict=True)
    )
    empty = {name: np.array([]) for name in names}
    axes = panel(full, None, empty)
    (line,) = axes.get_lines()
    # 2 of 8 blocks, 6 of 8, and none where there are none.
    assert line.get_ydata().tolist() == [25.0, 75.0, 0.0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["simulated"]
    assert panel(None, None).get_legend() is None
    labels = [text.get_text() for text in panel(full, full, full).get_legend().get_texts()]
    assert labels == ["live", "simulated"]


def test_validate_leaves_one_timeline_and_nothing_of_earlier_runs(tmp_path, monkeypatch):
    drawn = []
    draw = validate.draw_twin
    monkeypatch.setattr(validate, "draw_twin", lambda *parts: drawn.append(parts) or draw(*parts))
    monkeypatch.setattr("gpu_runtime.twin.probe.machine_slowness", lambda *_: 1.0)
    config, out = tmp_path / "config.json", tmp_path / "out"
    shape = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64}
    config.write_text(json.dumps(shape))
    words = f"validate --device cpu --model {config} --gpu cpu --workload fixed --input-len 9 --output-len 4 --quiet"
    words += " --request-rate 200 --num-prompts 3 --num-gpu-blocks-override 9 --max-model-len 64 --swap-space 0.01"
    words += f" --policy vllm-recompute --runs 1 --out {out}"
    kvtwin.main([*words.split(), "--timeline"])
    place, name = out / "vllm-recompute", "timeline.json.gz"
    files = [place / name, place / "simulated" / name, place / "live-1" / name]
    merged, *alone = (len(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]) for path in files)
    assert merged == sum(alone) > 0
    kvtwin.main(words.split())
    assert not list(place.rglob(name))
    for label, simulated, executed, *_ in drawn:
        assert (label, len(executed)) == ("vllm-recompute", 1)
        assert all(len(one.series["time_s"]) for one in (simulated, *executed))
    assert len(drawn) == 2


def test_nothing_of_a_failed_copy_is_under_way_when_its_failure_is_known():
    said = []
    worker, handle = CopyWorker.__new__(CopyWorker), CopyHandle()
    worker.stream = SimpleNamespace(synchronize=lambda: said.append(f"settled, known: {handle.done()}"))

    def fail():
        raise RuntimeError("the link is gone")

    worker._carry_out(fail, handle)
    assert said == ["settled, known: False"]
    with pytest.raises(CopyFailed, match="the link is gone"):
        handle.wait()
    well = CopyHandle()
    worker._carry_out(lambda: None, well)
    assert len(said) == 1 and well.done()


SEQ, OTHER = (Sequence(Request(number, 0.0, 10, 5)) for number in range(2))
BACK = Restore(SEQ, 10, (0,), (1, 2), (), 6)
"""Of three layers one is projected and two are copied."""
OUT = Move(SEQ, (0, 1), 0, 10, Tier.GPU, Tier.HOST, 6, 6, True)
WENT = Moved(SEQ, (0, 1), Direction.D2H, 6)


def planned(**parts):
    """A plan of these parts."""
    plan = IterationPlan()
    for name, value in parts.items():
        setattr(plan, name, value)
    return plan


RIGHT = {
    "computed back": ((BACK,), (), [BACK], [], ()),
    "copied back": ((Restore(SEQ, 10, (), (1, 2), (), 6),), (), [Moved(SEQ, (1, 2), Direction.H2D, 6)], [], ()),
    "nobody came back who was given up": ((BACK,), (), [], [], (SEQ,)),
    "copies of who was given up count": ((OUT,), (), [WENT], [], (SEQ,)),
    "those behind a prefill do not": ((), (OUT,), [], [WENT], (SEQ,)),
    "nor where there were none": ((), (OUT,), [], [], (SEQ,)),
    "of others they do": ((BACK, OUT), (), [BACK, WENT], [], (OTHER,)),
}
WRONG = {
    "not computed back": ((BACK,), (), [], [], ()),
    "computed back unplanned": ((), (), [BACK], [], ()),
    "not copied back": ((Restore(SEQ, 10, (), (1, 2), (), 6),), (), [], [], ()),
    "who was not given up did not come back": ((BACK,), (), [], [], (OTHER,)),
    "who was given up went out unplanned": ((), (), [WENT], [], (SEQ,)),
    "a copy of who was given up is missing": ((OUT,), (), [], [], (SEQ,)),
    "nothing left behind a prefill": ((), (OUT,), [], [], (OTHER,)),
    "more left behind a prefill": ((), (), [], [WENT], ()),
    "other blocks": ((OUT,), (), [WENT._replace(num_blocks=5)], [], ()),
}


@pytest.mark.parametrize(
    ("case", "holds"), [*((c, True) for c in RIGHT.values()), *((c, False) for c in WRONG.values())]
)
def test_what_was_executed_is_what_was_planned(case, holds):
    changes, behind, moves, sent, given_up = case
    plan = planned(changes=changes, behind=behind)
    done = Executed(moves=moves, behind=sent, given_up=set(given_up))
    # Of copies behind prefills no inputs are saved.
    plan.behind_blocks = sum(move.num_blocks for move in behind)
    if holds:
        done.check(plan)
    else:
        with pytest.raises(InvariantError, match=r"executed, .* planned"):
            done.check(plan)


STREAMED = (
    Streamed(2, num_read=3, num_written=2),
    Projected(2, num_read=5, num_written=6, num_tokens=8, num_inputs=1),
    Rebuilt(0, 7, 4, ((SEQ, 10), (OTHER, 4)), (0, 1, 2), None, False),
)
COUNTS = {
    "num_read": 3 + 5 + 7,
    # Inputs of new tokens are no KV; each of the others stands for one.
    "num_written": 2 + 6 + 4 - 1,
    "num_projected": 2 * 8,
    "num_rebuilt": 3 * (10 + 4),
    "num_saved": 6 - 1,
    "num_decodes": 4,
}


@pytest.mark.parametrize("name", [None, *COUNTS])
@pytest.mark.parametrize("off", [-1, 1])
def test_what_was_counted_is_what_was_planned(name, off):
    plan = planned(streamed=STREAMED, decodes=(SEQ,) * 4, num_decodes=4)
    counted = dict(COUNTS)
    if name is None:
        # Where more leaves behind a prefill than its KV, its inputs do, of each of two layers.
        for extra, saved in ((0, 0), (1, 2 * 10)):
            with_prefill = planned(streamed=STREAMED, num_decodes=4, behind=(OUT,), behind_blocks=6 + extra)
            Executed(behind=[WENT], **(counted | {"num_saved": 5 + saved})).check(with_prefill)
        Executed(**counted).check(plan)
        return
    counted[name] += off
    with pytest.raises(InvariantError, match=r"executed, .* planned"):
        Executed(**counted).check(plan)
    done = Executed(**counted, given_up={SEQ})
    if name == "num_decodes":
        with pytest.raises(InvariantError, match="sequences that decode"):
            done.check(plan)
    else:
        done.check(plan)
