"""Small duties of the live half: what it starts from, what it leaves, and what its checks find out."""
# ruff: noqa: E402 (torch may be absent)

import gzip
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("psutil")

import kvtwin
from gpu_runtime.model.weights import RandomWeights
from gpu_runtime.serve import run
from gpu_runtime.turn_states import StateBlocks
from gpu_runtime.twin import figure, validate
from kvtwin.testing.live import SMALL, small_decoder
from sim.errors import InvariantError


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


def panel(*series):
    """The panel of KV blocks of a simulated run and live ones, with their time series."""
    axes = figure.new_figure(4.0, 3.0).subplots()
    simulated, *live = (SimpleNamespace(series=one) for one in series)
    figure._draw_memory(axes, simulated, live)
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
    ((label, simulated, live, *_),) = drawn
    assert (label, len(live)) == ("vllm-recompute", 1)
    assert all(len(run.series["time_s"]) for run in (simulated, *live))
    kvtwin.main(words.split())
    assert not list(place.rglob(name))
