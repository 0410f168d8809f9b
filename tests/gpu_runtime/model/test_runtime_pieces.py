"""Iterations with prompts through `PieceGraphs`: in order, padded, and with the same tokens.

What is captured here is the computation itself, which runs again on the pieces' own tensors.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_small import GRAPHED, PIECED, Runner, Warm
from runtime_variants import STREAM
from test_runtime_policies import WORKLOADS, check

from gpu_runtime.model.capture_sizes import piece_sizes
from gpu_runtime.model.decoder import Decoder, DecoderLayer
from gpu_runtime.model.piece_graphs import PieceGraphs
from kvtwin.testing.live import ROWS, small_decoder
from sim.cost.engine_profile import load_engine_profile


class Tape:
    """Records what is captured, and which of it is replayed."""

    def __init__(self):
        self.pieces, self.told = 0, []

    def __call__(self, compute):
        piece = self.pieces
        self.pieces += 1

        def replay():
            self.told.append(piece)
            compute()

        return replay


def test_pieces_and_attention_take_turns(monkeypatch):
    """Four layers: five pieces a size, the larger size first; between them attention, of the tokens that there are."""
    tape, attend = Tape(), DecoderLayer.attend

    def told(self, projected, batch, pool, index):
        tape.told.append(f"attention {index} of {len(projected)}")
        return attend(self, projected, batch, pool, index)

    monkeypatch.setattr(DecoderLayer, "attend", told)
    runner = Runner(small_decoder())
    pieces = PieceGraphs(runner.decoder, [4, 8], tape)
    assert tape.pieces == 10
    pieces.forward(torch.tensor([1, 2, 3]), runner.batch({0: [1, 2], 1: [3]}), runner.pool)
    between = [f"attention {layer} of 3" for layer in range(4)]
    assert tape.told == [5, between[0], 6, between[1], 7, between[2], 8, between[3], 9]


def test_padding_is_seen_by_no_token_and_writes_no_kv():
    """Against the same decoder without graphs: a long iteration first, of which padding finds the remains."""
    ours, theirs = (Runner(small_decoder()) for _ in range(2))
    pieces = PieceGraphs(theirs.decoder, [16, 4], lambda compute: compute)
    for new in ({0: list(range(9)), 1: [3] * 6}, {0: [1], 2: [7, 8]}, {1: [5], 0: [6], 2: [9, 9, 9]}):
        expected, batch = ours.step(new), theirs.batch(new)
        assert pieces.fits(batch.num_tokens)
        logits = pieces.forward(torch.tensor([t for tokens in new.values() for t in tokens]), batch, theirs.pool)
        for row, seq in zip(logits, new, strict=True):
            torch.testing.assert_close(row, expected[seq][-1], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(theirs.pool.data, ours.pool.data, atol=1e-5, rtol=1e-4)
    assert not pieces.fits(17)


@settings(max_examples=20, deadline=None)
@given(variant=st.sampled_from(["vllm-recompute", "vllm-swap", "vllm-v1", STREAM]), rows=WORKLOADS)
def test_no_workload_finds_a_token_that_pieces_change(variant, rows):
    check(variant, rows, gpu=24, host=40, seqs=5, chunked=True, options={"kind": Warm, **PIECED})


@pytest.mark.parametrize(
    ("variant", "options", "way"),
    [("vllm-v1", PIECED, "pieces"), ("vllm-v1", GRAPHED, "layers"), ("hcache", PIECED, "layers")],
)
def test_what_fits_runs_in_pieces_unless_something_acts_between_layers(variant, options, way, monkeypatch):
    ways = Counter()
    for owner, name in ((PieceGraphs, "pieces"), (Decoder, "layers")):

        def counted(self, token_ids, *rest, forward=owner.forward, name=name, **named):
            # Graphs of decodes, and what checks tokens, compute layers with nothing between them.
            ways[name] += len(token_ids) <= 16 and (name == "pieces" or "before_layer" in named)
            return forward(self, token_ids, *rest, **named)

        monkeypatch.setattr(owner, "forward", counted)

    class Counting(Warm):
        def warm_up(self):
            super().warm_up()
            ways.clear()

    check(variant, ROWS, chunked=True, options={**options, "kind": Counting})
    assert {name for name, count in ways.items() if count} == {way}


@pytest.mark.parametrize(
    ("seqs", "tokens", "sizes"), [(3, 2048, [1, 2, 4]), (256, 20, [1, 2, 4, 8, 16, 24]), (1, 8, [1, 2])]
)
def test_sizes_are_vllms(seqs, tokens, sizes):
    """`VllmConfig._set_cudagraph_sizes`: twice the sequences at most; and no larger than what a batch can fill."""
    assert piece_sizes(seqs, tokens) == sizes
    assert tuple(piece_sizes(256, 2048)) == load_engine_profile("vllm-v1").sized(256).graph_batch_sizes
