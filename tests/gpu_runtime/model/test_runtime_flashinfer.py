"""flashinfer's kernels behind our interface, with a stand-in that has its documented semantics on a CPU."""

import inspect
import sys
from importlib.util import find_spec

import flashinfer_stand_in as stand_in
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_small import SMALL, Runner

from gpu_runtime.machine.live_memory import fit_to_machine
from gpu_runtime.model import backend, flashinfer_kernels
from gpu_runtime.model.decode_graph import DecodeGraph
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.model.flashinfer_kernels import build_kernels
from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.systems import POLICIES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stands_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setattr(flashinfer_kernels, "WORKSPACE_BYTES", 1 << 10)


def decoders(dtype=torch.float32):
    """Two of the same weights: with our kernels, and with flashinfer's."""
    ours, theirs = (Decoder.random(SMALL, device="cpu", dtype=dtype, seed=0) for _ in range(2))
    theirs.compute_with(build_kernels("flashinfer", SMALL.num_heads, dtype, CPU))
    return ours, theirs


def runners(kv_dtype=None, block_tokens=4):
    return (Runner(d, SMALL.num_layers, block_tokens, seed=s, kv_dtype=kv_dtype) for s, d in enumerate(decoders()))


STEPS = st.lists(
    st.dictionaries(st.integers(0, 4), st.one_of(st.just(1), st.integers(1, 12)), min_size=1), min_size=1, max_size=6
)


@settings(deadline=None, max_examples=20)
@given(steps=STEPS, block_tokens=st.integers(1, 5), kv_dtype=st.sampled_from([None, torch.float8_e4m3fn]))
def test_any_iterations_give_the_logits_of_plain_torch(steps, block_tokens, kv_dtype):
    """Prompts, further chunks and decodes in any mix; KV in fewer bits too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", stand_in)
        patch.setattr(flashinfer_kernels, "WORKSPACE_BYTES", 1 << 10)
        ours, theirs = runners(kv_dtype, block_tokens)
    for number, step in enumerate(steps):
        new = {seq: [(7 * seq + 3 * number + i) % SMALL.vocab_size for i in range(n)] for seq, n in step.items()}
        expected, found = ours.step(new), theirs.step(new)
        for seq in new:
            torch.testing.assert_close(found[seq], expected[seq], atol=2e-5, rtol=1e-4)


def test_a_layers_input_stays_for_what_keeps_it():
    """Sums and norms are made in place; what runs behind a layer may save what entered it."""
    ours, theirs = runners()
    for runner in (ours, theirs):
        runner.step({0: [1, 2, 3], 1: [4]})
    assert sorted(theirs.hidden) == list(range(SMALL.num_layers))
    for layer, entered in ours.hidden.items():
        torch.testing.assert_close(theirs.hidden[layer], entered, atol=2e-5, rtol=1e-4)


def test_an_iteration_is_planned_once_for_all_layers():
    _, runner = runners()
    kernels = runner.decoder.kernels
    runner.step({0: [1, 2, 3, 4, 5], 1: [6]})
    assert (kernels._chunks.plans, kernels._decodes.plans) == (1, 0)
    assert kernels._chunks.queries.tolist() == [0, 5, 6]
    assert kernels._chunks.indptr.tolist() == [0, 2, 3]
    assert kernels._chunks.last_page_len.tolist() == [1, 1]
    assert kernels._chunks.indices.tolist() == [*runner.tables[0][0], *runner.tables[1][0]]
    runner.step({1: [7], 0: [8]})
    assert (kernels._chunks.plans, kernels._decodes.plans) == (1, 1)
    assert kernels._decodes.last_page_len.tolist() == [2, 2]
    assert kernels._decodes.shape == (SMALL.num_heads, SMALL.num_kv_heads, SMALL.head_dim, 4)


def test_graphs_are_planned_anew_before_each_run():
    """Two sizes: buffers stay where the graph knows them, and padding has a block to read."""
    ours, theirs = runners()
    graph = DecodeGraph(theirs.decoder, theirs.pool, [2, 4], 12, capture=lambda compute: compute)
    # Interpreted, padding would write to the last block: no sequence may have it.
    theirs.pool.ids._free.remove(theirs.pool.num_blocks - 1)
    captured = {len(batch.num_new): wrapper for batch, wrapper in theirs.decoder.kernels._captured.items()}
    places = {size: (w.indptr.data_ptr(), w.indices.data_ptr()) for size, w in captured.items()}
    assert sorted(captured) == [2, 4]
    assert [w.plans for w in captured.values()] == [1, 1]
    prompts = {0: list(range(19)), 1: [3], 2: list(range(30, 40))}
    ours.step(prompts)
    theirs.step(prompts)
    for new in ({0: [1], 1: [2], 2: [3]}, {1: [4], 0: [9]}, {2: [5], 0: [6]}, {0: [7], 1: [8], 2: [9]}):
        expected, logits = ours.step(new), graph.run(*theirs.decodes(new)).logits
        for row, seq in zip(logits, new, strict=True):
            torch.testing.assert_close(row, expected[seq][0], atol=2e-5, rtol=1e-4)
    assert captured[4].last_page_len.tolist() == [(19 + 4 - 1) % 4 + 1, (1 + 3 - 1) % 4 + 1, (10 + 3 - 1) % 4 + 1, 1]
    assert [captured[size].plans for size in (4, 2)] == [3, 3]
    assert {size: (w.indptr.data_ptr(), w.indices.data_ptr()) for size, w in captured.items()} == places


def test_pools_with_a_table_for_each_layer_are_refused():
    _, theirs = decoders()
    with pytest.raises(ValueError, match="one block table for all layers, the pool has 4"):
        Runner(theirs, 1).step({0: [1]})
    scenario = Scenario(model="qwen3-0.6b", gpu="cpu", num_gpu_blocks_override=9, num_cpu_blocks_override=9)
    assert fit_to_machine(scenario, POLICIES["vllm-recompute"](), "cpu", theirs) == scenario
    with pytest.raises(UserError, match=r"flashinfer: layerkv keeps 28 block tables a sequence.*use triton"):
        fit_to_machine(scenario, POLICIES["layerkv"](), "cpu", theirs)


@pytest.mark.parametrize(
    ("name", "device", "changes", "refusal"),
    [
        ("flashinfer", "cpu", {}, "does not run on --device cpu: use one of auto, fastest, torch"),
        ("torch", "cuda", {}, "does not run on --device cuda: use one of auto, fastest, triton, flashinfer"),
        ("flashinfer", "cuda", {"absent": True}, r"pip install 'kvtwin\[flashinfer\]'"),
        ("flashinfer", "cuda", {"dtype": torch.float32}, "16 bits, not in torch.float32: give --dtype bfloat16"),
        ("flashinfer", "cuda", {"windows": (9, None)}, "attends to all tokens, and small has layers with a window"),
        ("flashinfer", "cuda", {"head_dim": 80}, "heads of 80 elements, it has kernels for 64, 128, 256"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(monkeypatch, name, device, changes, refusal):
    changes = {"absent": False, "dtype": torch.bfloat16, "head_dim": 128} | changes
    absent, dtype = changes.pop("absent"), changes.pop("dtype")
    monkeypatch.setattr(backend, "find_spec", lambda _: None if absent else object())
    with pytest.raises(UserError, match=refusal):
        backend.check_backend(name, device, dtype, msgspec.structs.replace(SMALL, **changes))


def function(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.mark.parametrize("name", stand_in.PARAMETERS)
def test_the_stand_in_takes_what_flashinfer_takes(name):
    own = [parameter for parameter in inspect.signature(function(stand_in, name)).parameters if parameter != "self"]
    recorded = stand_in.PARAMETERS[name]
    assert own[: len(recorded)] == recorded


@pytest.mark.parametrize("name", stand_in.PARAMETERS)
def test_flashinfer_itself_takes_them(monkeypatch, name):
    monkeypatch.undo()
    if find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    theirs = inspect.signature(function(pytest.importorskip("flashinfer"), name)).parameters
    recorded = stand_in.PARAMETERS[name]
    assert [parameter for parameter in theirs if parameter != "self"][: len(recorded)] == recorded
