"""What is executed at a point, on this CPU: copies byte by byte, layers, whole iterations as they are asked."""

from itertools import islice
from math import inf
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure_small import write_config

from calib.measure import engine_steps
from calib.measure.copy_ops import CopyBuffers
from calib.measure.layer_ops import ModelWork
from calib.measure.lengths import drawn_lengths, spread_lengths
from calib.measure.points import Point, mean_tokens
from sim.specs.models import load_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", ["d2h", "h2d"])
def test_copies_take_every_place_once_before_any_twice(op):
    """64 places of 64 bytes, 16 pieces a copy: four copies move all, each to another place."""
    buffers = CopyBuffers(64 * 64 + 5, CPU, 3)
    work = buffers.work(Point(op=op, num_bytes=64 * 16, num_copies=16, memory="pageable"))
    device, host = buffers._buffer("device"), buffers._buffer("pageable")
    source, target = (device, host) if op == "d2h" else (host, device)
    rows = {bytes(row.tolist()) for row in source[:4096].view(64, 64)}
    before = source.clone()
    target.zero_()
    for count in (16, 32, 48, 64):
        work()
        arrived = {bytes(row.tolist()) for row in target[:4096].view(64, 64) if row.any()}
        assert len(arrived) == count and arrived <= rows
    assert torch.equal(source, before) and not target[4096:].any()
    # Then the same places again.
    target.zero_()
    work()
    assert sum(bool(row.any()) for row in target[:4096].view(64, 64)) == 16


def test_host_copies_go_through_the_buffers_in_turn():
    """1,000 of 4,096 bytes: four places in turn, then the first again."""
    buffers = CopyBuffers(4096, CPU, 0)
    work = buffers.work(Point(op="host_memcpy", num_bytes=1000))
    source, target = buffers._buffer("pinned"), buffers._buffer("pageable")
    target.zero_()
    for turn in range(1, 5):
        work()
        assert torch.equal(target[: 1000 * turn], source[: 1000 * turn]) and not target[1000 * turn :].any()
    source[:2000] = 7
    work()
    assert (target[:1000] == 7).all() and not (target[1000:2000] == 7).all()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two layers of the small model with nine blocks of KV each."""
    spec = load_model(str(write_config(tmp_path_factory.mktemp("models") / "small")))
    shape = {"num_layers": 2, "kv_blocks": 9, "longest": 64}
    return ModelWork(spec, **shape, device=CPU, dtype=torch.float32, seed=0, capture=lambda compute: compute)


def test_layers_by_piece_are_those_that_are_launched(small):
    """Two prompts of five tokens and two decodes in a graph for 16 tokens: the same KV, at the same places."""
    shape = {"model": "small", "num_layers": 2, "new_tokens": 30, "decodes": 2, "decode_context_tokens": 20}
    point = Point(op="layers", graph=2, **shape)
    assert changed(small, point) == 2 * (2 + 2)
    with torch.inference_mode():
        work = next(small.works(point))
        ours = work().clone()
        assert ours.shape == (32, 64) and not torch.equal(ours, torch.zeros_like(ours))
        assert torch.equal(work(), ours)


def changed(work, point):
    """How many of the pool's blocks a point writes to."""
    execute = next(work.works(point))
    before = work._pool.data.clone()
    with torch.inference_mode():
        execute()
    now, was = (data.reshape(work._pool.num_blocks, -1) for data in (work._pool.data, before))
    return int((now != was).any(dim=1).sum())


def test_each_layer_writes_the_kv_of_its_own_blocks(small):
    """33 tokens in blocks of 16: three a layer. A decode after 20 writes to one of its two."""
    shape = {"model": "small", "num_layers": 2}
    assert changed(small, Point(op="layers", new_tokens=33, **shape)) == 6
    assert changed(small, Point(op="restore", new_tokens=33, **shape)) == 6
    assert changed(small, Point(op="layers", new_tokens=1, context_tokens=20, batch_size=4, **shape)) == 8
    assert changed(small, Point(op="recompute", new_tokens=33, model="small", num_layers=3)) in (3, 6)
    beside = Point(op="layers", new_tokens=33, decodes=2, decode_context_tokens=20, **shape)
    assert changed(small, beside) == 10
    with torch.inference_mode():
        assert next(small.works(beside))().shape == (35, 64)
        assert next(small.works(Point(op="layers", new_tokens=5, batch_size=2, **shape)))().shape == (10, 64)
        assert next(small.works(Point(op="lm_head", batch_size=3, new_tokens=1, model="small")))().shape == (3, 500)


def test_a_wave_is_sent_once_the_one_before_has_ended():
    sent = []
    inbox = engine_steps.Waves(Point(op="step", batch_size=3, new_tokens=5), 2, 4)
    assert (inbox.next_s, inbox.unfinished) == (0.0, 0)
    inbox.deliver(7.0, sent.append)
    inbox.deliver(8.0, sent.append)
    assert [(r.request_id, r.arrival_s, r.prompt_tokens, r.output_tokens) for r in sent] == [
        (i, 7.0, 5, 4) for i in range(3)
    ]
    assert (inbox.next_s, inbox.unfinished) == (0.0, 3)
    inbox.unfinished = 0
    inbox.deliver(9.0, sent.append)
    assert [r.request_id for r in sent] == list(range(6)) and inbox.next_s == inf
    inbox.unfinished = 0
    inbox.deliver(9.0, sent.append)
    assert len(sent) == 6
    decodes = engine_steps.Waves(Point(op="step", batch_size=2, new_tokens=1, context_tokens=120), 1, 4)
    sent.clear()
    decodes.deliver(0.0, sent.append)
    assert [r.prompt_tokens for r in sent] == [90, 150]


class Iterations:
    """Stands in for device and engine: tells what they were given, and of iterations that begin when they are told."""

    def __init__(self, monkeypatch, starts):
        self.starts, self.told = starts, []
        for name in ("DeviceMemory", "Engine", "TorchDevice", "LiveInstance", "VllmRecompute"):
            monkeypatch.setattr(engine_steps, name, getattr(self, name))

    def DeviceMemory(self, *_):
        return None

    def Engine(self, scheduler, predictor, ended):
        self.ended = ended

    def TorchDevice(self, memory, graph_batch_sizes, piece_sizes, prompt_of):
        self.graphs, self.pieces, self.prompt_of = graph_batch_sizes, piece_sizes, prompt_of
        return SimpleNamespace(
            **{name: lambda name=name: self.told.append(name) for name in ("warm_up", "start", "close")}
        )

    def VllmRecompute(self):
        def scheduler(limits, collector, deployment):
            self.limits, self.deployment = limits, deployment

        return SimpleNamespace(scheduler=scheduler)

    def LiveInstance(self, engine, device, inbox, observer):
        def serve():
            sent = []
            inbox.deliver(0.0, sent.append)
            self.sent = len(sent)
            for _ in sent:
                self.ended(None)
            self.left = inbox.unfinished
            for start_s, is_prompt in self.starts:
                observer(SimpleNamespace(chunks=(1,) if is_prompt else ()), start_s, None)

        return SimpleNamespace(serve=serve)


DECODER = SimpleNamespace(device=CPU, dtype=torch.float32)


def test_decodes_are_timed_from_start_to_start_after_two_warm_ups(monkeypatch):
    """Of 20 sequences about 120 tokens long: 90 to 150, seven tokens each. 10 + 1 blocks a sequence and 2 % more."""
    run = Iterations(monkeypatch, [(0.0, True), *((2.0**i, False) for i in range(7))])
    point = Point(op="step", batch_size=20, new_tokens=1, context_tokens=120, num_layers=1, graph=1)
    spec = load_model("llama-2-7b")
    assert engine_steps.engine_steps(DECODER, spec, point, 3) == [4.0, 8.0, 16.0]
    limits = run.limits
    assert (limits.num_gpu_blocks, limits.num_cpu_blocks, limits.block_size) == (220 + 4 + 2, 1, 16)
    assert (limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens) == (157, 20, 3000)
    assert (run.graphs, run.told, run.sent, run.left) == ((20,), ["warm_up", "start", "close"], 20, 0)
    assert (run.deployment.model.num_layers, run.deployment.model.hidden_size) == (1, 4096)
    request = SimpleNamespace(prompt_tokens=3, request_id=31_995)
    assert run.prompt_of(request) == [31_995, 2, 9]


def test_prompts_are_timed_alone(monkeypatch):
    """Each wave computes its prompts and one token more: the first iterations last 1, 2, 4 ... s."""
    starts = [start for i in range(5) for start in ((100.0 * i, True), (100.0 * i + 2**i, False))]
    run = Iterations(monkeypatch, [*starts, (500.0, True)])
    point = Point(op="step", batch_size=1, new_tokens=64, num_layers=2)
    assert engine_steps.engine_steps(DECODER, load_model("llama-2-7b"), point, 2) == [4.0, 8.0]
    limits = run.limits
    assert (limits.num_gpu_blocks, limits.max_model_len, limits.max_num_batched_tokens) == (6 + 2, 67, 67)
    assert (run.graphs, run.pieces, run.sent) == ((), (), 1)
    assert Point(op="step", new_tokens=63, graph=2).draw == 1
    run = Iterations(monkeypatch, [(0.0, True)])
    engine_steps.engine_steps(DECODER, load_model("llama-2-7b"), Point(op="step", new_tokens=63, graph=2), 1)
    # Prompts of up to 64 tokens.
    assert (run.graphs, run.pieces) == ((), (64,))


@given(st.integers(1, 300), st.integers(1, 20_000))
def test_contexts_spread_about_their_mean(batch_size, context_tokens):
    lengths = spread_lengths(Point(op="step", batch_size=batch_size, new_tokens=1, context_tokens=context_tokens))
    assert len(lengths) == batch_size
    assert sum(lengths) == batch_size * context_tokens
    assert context_tokens * 0.75 - 1 <= min(lengths) and max(lengths) <= context_tokens * 1.25 + 1


def test_four_contexts_by_hand():
    point = Point(op="step", batch_size=4, new_tokens=1, context_tokens=120)
    assert spread_lengths(point) == [90, 110, 130, 150]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_prompts_have_lengths_that_come_once_up_to_the_grids(batch_size):
    """A kernel library that makes a plan for every length would else be timed without: 512 tokens are 496 to 512."""
    point = Point(op="layers", batch_size=batch_size, new_tokens=mean_tokens(512))
    lengths = list(islice(drawn_lengths(point, 3), 17))
    for sequence in zip(*lengths, strict=True):
        assert sorted(sequence) == list(range(496, 513))
    if batch_size % 2 == 0:
        assert {sum(found) for found in lengths} == {point.tokens}
    assert point.length == 512 and next(drawn_lengths(point, 3)) == lengths[0] != next(drawn_lengths(point, 4))


def test_what_has_no_length_of_its_own_is_executed_as_it_is():
    """Decodes, chunks after cached tokens, and prompts of a few tokens."""
    for shape in ({"new_tokens": 1}, {"new_tokens": 512, "context_tokens": 16}, {"new_tokens": 16}):
        point = Point(op="layers", batch_size=2, **shape)
        assert list(islice(drawn_lengths(point, 0), 2)) == [[point.new_tokens] * 2] * 2 and point.draw == 0
