"""Decodes through `DecodeGraph`: only where nothing happens between layers, padded, and with the same tokens.

What is captured here is not a CUDA graph but the computation itself, which runs again on the graph's own tensors.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_small import GRAPHED, SMALL, Runner, Warm
from runtime_variants import FEW, STREAM
from test_runtime_policies import WORKLOADS, check

from gpu_runtime.model import decode_graph
from gpu_runtime.model.capture_sizes import capture_sizes
from gpu_runtime.model.decode_graph import DecodeGraph, capture_graph
from gpu_runtime.model.decoder import Decoder, Scores
from gpu_runtime.tokens import tokens_in_flight
from kvtwin.testing import limits, live, requests
from kvtwin.testing.live import ROWS, small_decoder
from sim.engine.sequence import Status
from sim.systems import POLICIES


@pytest.fixture
def graphed(monkeypatch):
    """The (kind, batch size) of every pass computed by devices that `OPTIONS` make, which capture 1, 2 and 4."""
    passes = []
    forward, replay = Decoder.forward, DecodeGraph.run
    replaying = []

    def replayed(self, tokens, *rest, **between):
        passes.append(("graph by layer" if between.keys() > {"late"} else "graph", self.size_of(len(tokens))))
        replaying.append(True)
        try:
            return replay(self, tokens, *rest, **between)
        finally:
            replaying.clear()

    def computing(self, token_ids, batch, *rest, **named):
        if not replaying and "before_layer" in named:
            work = named["before_layer"].__self__
            kind = "prompt" if not work._only_decodes else "slots" if work._moving else "decode"
            passes.append((kind, len(batch.num_new)))
        return forward(self, token_ids, batch, *rest, **named)

    class Graphed(Warm):
        def warm_up(self):
            super().warm_up()
            passes.clear()

    monkeypatch.setattr(Decoder, "forward", computing)
    monkeypatch.setattr(DecodeGraph, "run", replayed)
    options = {"kind": Graphed, **GRAPHED}

    def checked(variant, rows, **sizes):
        return check(variant, rows, options=options, **sizes)

    return SimpleNamespace(passes=passes, check=checked)


@pytest.mark.parametrize("variant", ["vllm-recompute", *FEW])
def test_decodes_run_in_graphs_and_nothing_else_does(variant, graphed):
    graphed.check(variant, ROWS, gpu=60)
    sizes = {kind: {size for other, size in graphed.passes if other == kind} for kind in ("graph", "decode", "prompt")}
    # Three decodes are padded to four; none of what fits runs eagerly.
    assert sizes["graph"] and sizes["graph"] <= {1, 2, 4}
    assert sizes["decode"] <= {5, 6}
    assert sizes["prompt"]
    if variant.startswith("vllm"):
        assert sizes["decode"]


@pytest.mark.parametrize("variant", ["hcache", "ellm:layer-order=contiguous"])
def test_what_needs_more_than_blocks_runs_no_graph(variant, graphed):
    graphed.check(variant, ROWS, gpu=60)
    assert {kind for kind, _ in graphed.passes} == {"prompt", "decode"}


@pytest.mark.parametrize("variant", [STREAM, "kvpr"])
def test_layers_that_stream_in_are_graphs_of_their_own(variant, graphed):
    """One sequence with KV on the host does not make the others' decodes eager."""
    graphed.check(variant, ROWS)
    kinds = {kind: {size for other, size in graphed.passes if other == kind} for kind, _ in graphed.passes}
    assert kinds["graph by layer"] <= {1, 2, 4}
    # Only what is more than was captured.
    assert kinds.get("slots", set()) | kinds.get("decode", set()) <= {5, 6}


def test_a_chunk_of_one_token_is_no_decode(graphed):
    sizes = limits(60, block_size=4, max_model_len=64, seqs=6, chunked=True, tokens=8)
    graphed.check("vllm-recompute", [(0.0, 1, 4), (0.0, 8, 1)], limit=sizes)
    kinds = [kind for kind, _ in graphed.passes]
    # All but one token of the other prompt fit beside the first one; that token is computed beside a decode.
    assert kinds == ["prompt", "prompt", "graph", "graph"]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(variant=st.sampled_from([*FEW, "kvpr"]), rows=WORKLOADS)
def test_no_workload_finds_a_token_that_a_graph_changes(variant, rows, graphed):
    graphed.check(variant, rows, gpu=24, host=40, seqs=5)


def test_a_replay_out_of_memory_is_computed_in_parts(graphed, monkeypatch):
    run = DecodeGraph.run

    def small_memory(self, tokens, *rest, late):
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return run(self, tokens, *rest, late=late)

    monkeypatch.setattr(DecodeGraph, "run", small_memory)
    served, completed = graphed.check("vllm-recompute", ROWS, gpu=60, seqs=4)
    assert len(completed) == len(ROWS)
    assert {seq.status for seq in served.ended} == {Status.FINISHED}
    assert {size for kind, size in graphed.passes if kind == "graph"} == {1, 2}


def test_greedy_tokens_come_from_graphs_and_no_logits_are_read(graphed, monkeypatch):
    run = DecodeGraph.run

    def without_logits(self, *rest, **named):
        return Scores(None, run(self, *rest, **named).likeliest)

    monkeypatch.setattr(DecodeGraph, "run", without_logits)
    graphed.check("vllm-recompute", ROWS, gpu=60)
    assert "graph" in {kind for kind, _ in graphed.passes}


def small_graph(block_tokens=16, max_blocks=33, **options):
    decoder = small_decoder()
    runner = Runner(decoder, block_tokens=block_tokens, layer_group=SMALL.num_layers)
    return runner, DecodeGraph(decoder, runner.pool, [2, 1], max_blocks, capture=lambda compute: compute, **options)


def test_a_batch_that_was_not_captured_is_refused():
    # 33 blocks hold 528 tokens, the model has 512 positions.
    runner, graph = small_graph()
    runner.step({0: list(range(20)), 1: [2], 2: [3]})
    assert graph.fits(2, 512) and not graph.fits(3, 20) and not graph.fits(1, 513)
    with pytest.raises(ValueError, match="3 sequences of up to 21 tokens: captured are decodes of 2 sequences and 512"):
        graph.run(*runner.decodes({0: [1], 1: [2], 2: [3]}))
    runner.batch({0: [0] * (512 - len(runner.tokens[0]))})
    with pytest.raises(ValueError, match="up to 513 tokens"):
        graph.run(*runner.decodes({0: [1]}))


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_without_memory_says_so_and_leaves_the_stream(monkeypatch, ends):
    """Torch ends the capture whatever happened in it; where that fails too, its stream stays current."""

    class Capturing:
        def __init__(self, graph, pool, stream):
            self.stream = stream

        def __enter__(self):
            current.append(self.stream)

        def __exit__(self, *_):
            if not ends:
                raise RuntimeError("operation failed due to a previous error during capture")
            current.pop()

    def compute():
        raise torch.OutOfMemoryError("tried to allocate too much")

    current = ["the caller's"]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    with pytest.raises(torch.OutOfMemoryError, match="too much"):
        capture_graph(compute, SimpleNamespace(device="cuda"))
    assert current[-1] == "the caller's"


def test_of_block_tables_only_what_has_changed_is_sent(monkeypatch):
    """Another captured size, as when a sequence ends, zeroed and wrote all tables anew: 0.5 to 33 ms with 32 tables."""
    sent = []
    monkeypatch.setattr(decode_graph, "to_device", lambda values, device: sent.append(values) or torch.tensor(values))
    runner, graph = small_graph(block_tokens=4)
    runner.step({0: list(range(20)), 1: list(range(9))})
    tokens, lengths, tables = runner.decodes({0: [1], 1: [2]})
    for count in (2, 1, 2, 1):
        graph.run(tokens[:count], lengths[:count], tables[:count])
    assert [values.shape[1] for values in sent] == [6 + 3]
    # The first begins a block, the other is in one that is known.
    runner.batch({0: [3] * 3})
    tokens, lengths, tables = runner.decodes({0: [4], 1: [5]})
    graph.run(tokens, lengths, tables)
    assert [values[1].tolist() for values in sent[1:]] == [[tables[0][0, -1]]]
    for place, rows in enumerate(tables):
        assert graph._tables.there[0, place, : rows.shape[1]].tolist() == rows[0].tolist()


def test_an_iteration_without_tokens_waits_for_the_device(monkeypatch):
    """Else it would seem to end when the last of its kernels was launched, and so early that the next is charged."""
    waited = []
    monkeypatch.setattr(tokens_in_flight, "mark", lambda device: SimpleNamespace(synchronize=lambda: waited.append(1)))
    policy = POLICIES["vllm-recompute"]()
    sizes = limits(60, block_size=4, max_model_len=64, seqs=6, chunked=True, tokens=8)
    served = live.serve(policy, requests((0.0, 30, 3)), sizes)
    plans = [plan for plan, _, _ in served.plans]
    without = [plan for plan in plans if plan.chunks and plan.chunks[0].num_cached + plan.chunks[0].num_new < 30]
    # The last plan gives back what ended last.
    assert len(without) == 3 and len(waited) - 1 == len(plans) == 6


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (3, [1, 2, 4]), (17, [1, 2, 4, 8, 16, 24])])
def test_sizes_are_vllms(most, sizes):
    assert capture_sizes(most) == sizes
