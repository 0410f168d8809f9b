"""Decodes through `DecodeGraph`: only where nothing happens between layers, padded, and with the same tokens.

What is captured here is not a CUDA graph but the computation itself, which runs again on the graph's own tensors.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from runtime_small import SMALL, Runner  # noqa: E402
from runtime_variants import STREAM, VARIANTS  # noqa: E402
from test_runtime_policies import WORKLOADS, check  # noqa: E402

from gpu_runtime.model.decode_graph import DecodeGraph, capture_sizes  # noqa: E402
from gpu_runtime.model.decoder import Decoder  # noqa: E402
from kvtwin.testing import limits  # noqa: E402
from kvtwin.testing.live import ROWS, CheckedDevice, small_decoder  # noqa: E402
from sim.engine.sequence import Status  # noqa: E402


@pytest.fixture
def graphed(monkeypatch):
    """The (kind, batch size) of every pass computed by devices that `OPTIONS` make, which capture 1, 2 and 4."""
    passes = []
    forward = Decoder.forward
    replaying = []

    def capture(compute):
        def replay():
            replaying.append(True)
            compute()
            replaying.clear()

        return replay

    def computing(self, token_ids, batch, *rest, **named):
        if replaying:
            passes.append(("graph", len(batch.num_new)))
        elif "before_layer" in named:
            work = named["before_layer"].__self__
            kind = "prompt" if not work._only_decodes else "slots" if work._moving else "decode"
            passes.append((kind, len(batch.num_new)))
        return forward(self, token_ids, batch, *rest, **named)

    class Graphed(CheckedDevice):
        def start(self):
            with torch.inference_mode():
                self.warm_up()
            passes.clear()
            super().start()

    monkeypatch.setattr(Decoder, "forward", computing)
    # Plain torch has no place to write nowhere: padding writes to the last block, which is nobody's.
    options = {"kind": Graphed, "graph_batch_sizes": (1, 2, 4), "capture": capture, "spare_blocks": 1}

    def checked(variant, rows, **sizes):
        return check(variant, rows, options=options, **sizes)

    return SimpleNamespace(passes=passes, check=checked)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decodes_run_in_graphs_and_nothing_else_does(variant, graphed):
    graphed.check(variant, ROWS, gpu=60)
    sizes = {kind: {size for other, size in graphed.passes if other == kind} for kind in ("graph", "decode", "prompt")}
    # Three decodes are padded to four; none of what fits runs eagerly.
    assert sizes["graph"] and sizes["graph"] <= {1, 2, 4}
    assert sizes["decode"] <= {5, 6}
    assert sizes["prompt"]
    if variant.startswith("vllm"):
        assert sizes["decode"]


def test_layers_that_stream_in_are_not_in_a_graph(graphed):
    graphed.check(STREAM, ROWS)
    assert "slots" in dict(graphed.passes)


def test_a_chunk_of_one_token_is_no_decode(graphed):
    sizes = limits(60, block_size=4, max_model_len=64, seqs=6, chunked=True, tokens=8)
    graphed.check("vllm-recompute", [(0.0, 1, 4), (0.0, 8, 1)], limit=sizes)
    kinds = [kind for kind, _ in graphed.passes]
    # All but one token of the other prompt fit beside the first one; that token is computed beside a decode.
    assert kinds == ["prompt", "prompt", "graph", "graph"]


def test_a_sequence_that_outgrows_the_graphs_goes_on_without(graphed):
    graphed.check("vllm-recompute", [(0.0, 4, 20)], gpu=60, max_model_len=12)
    assert [size for kind, size in graphed.passes if kind == "graph"] == [1] * 8
    assert [size for kind, size in graphed.passes if kind == "decode"] == [1] * 11


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=WORKLOADS)
def test_no_workload_finds_a_token_that_a_graph_changes(variant, rows, graphed):
    graphed.check(variant, rows, gpu=24, host=40, seqs=5)


def test_a_replay_out_of_memory_is_computed_in_parts(graphed, monkeypatch):
    run = DecodeGraph.run

    def small_memory(self, token_ids, batch):
        if len(token_ids) > 2:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return run(self, token_ids, batch)

    monkeypatch.setattr(DecodeGraph, "run", small_memory)
    served, completed = graphed.check("vllm-recompute", ROWS, gpu=60, seqs=4)
    assert len(completed) == len(ROWS)
    assert {seq.status for seq in served.ended} == {Status.FINISHED}
    assert {size for kind, size in graphed.passes if kind == "graph"} == {1, 2}


def test_a_batch_that_was_not_captured_is_refused():
    decoder = small_decoder()
    runner = Runner(decoder, block_tokens=16, layer_group=SMALL.num_layers)
    # 33 blocks hold 528 tokens, the model has 512 positions.
    graph = DecodeGraph(decoder, runner.pool, [2, 1], 33, capture=lambda compute: compute)
    runner.step({0: list(range(20)), 1: [2], 2: [3]})
    assert graph.fits(runner.batch({0: [1], 1: [2]}))
    for new in ({0: [1, 2]}, {0: [1], 1: [2], 2: [3]}):
        batch = runner.batch(new)
        assert not graph.fits(batch)
        with pytest.raises(ValueError, match="captured are decodes of 2 sequences, 33 blocks and 512 tokens"):
            graph.run(torch.zeros(batch.num_tokens, dtype=torch.int64), batch)
    runner.batch({0: [0] * (512 - len(runner.tokens[0]))})
    assert not graph.fits(runner.batch({0: [1]}))


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (5, [1, 2, 4, 8]), (16, [1, 2, 4, 8, 16]), (17, [1, 2, 4, 8, 16, 24])],
)
def test_sizes_are_vllms(most, sizes):
    assert capture_sizes(most) == sizes


def test_sizes_end_at_256():
    assert capture_sizes(256) == capture_sizes(1000) == [1, 2, 4, *range(8, 257, 8)]
    with pytest.raises(ValueError, match="max_num_seqs 0"):
        capture_sizes(0)
