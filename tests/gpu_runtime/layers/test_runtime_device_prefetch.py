"""Layers that stream in from the host are fetched ahead of the computation, and never into a slot still in use."""

import random
import time

import pytest
import torch
from runtime_variants import STREAM, policy_of

from gpu_runtime.kv import copy_engine
from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyEngine
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.replay.held import Held
from gpu_runtime.kv.replay.placement import Placement
from gpu_runtime.layers.layer_pass import Graphs, LayerPass
from gpu_runtime.layers.pass_members import BlockTables
from gpu_runtime.model.decoder import DecoderLayer
from kvtwin.testing import live, requests
from kvtwin.testing.live import ROWS, SMALL, small_decoder, tight_limits
from sim.engine.changes import Direction
from sim.engine.sequence import Sequence
from traces.request import Request


def serve(chunked=False):
    policy, arrivals = policy_of(STREAM), requests(*ROWS)
    served = live.serve(policy, arrivals, tight_limits(policy, chunked=chunked))
    assert len(live.check_tokens(served, arrivals)) == len(ROWS)


class Watched:
    """A pass over layers whose KV is where a test puts it, and what happened in it, a letter each.

    `i`, `o`: a copy to the GPU or from it is submitted; `L`: a layer starts.
    """

    def __init__(self, monkeypatch, *, inline):
        self.events = ""
        copy_blocks, layer = CopyEngine.copy_blocks, DecoderLayer.attend

        def copying(engine, src_pool, src_ids, dst_pool, dst_ids, direction):
            self.events += "i" if direction is Direction.H2D else "o"
            return copy_blocks(engine, src_pool, src_ids, dst_pool, dst_ids, direction)

        def starting(*arguments, **named):
            self.events += "L"
            return layer(*arguments, **named)

        monkeypatch.setattr(CopyEngine, "copy_blocks", copying)
        monkeypatch.setattr(DecoderLayer, "attend", starting)
        self.gpu, self.host = (KVPool(SMALL, 200, 4, 1, "cpu", torch.float32) for _ in range(2))
        self.placement = Placement(self.gpu.ids, self.host.ids, num_groups=4, block_tokens=4)
        self.engine = CopyEngine("cpu", inline=inline)
        copies = KVCopies(self.engine, self.gpu, self.host, lambda seq, reason: pytest.fail(reason))
        self.scratch = BlockIds(200)
        self.scratch.allocate(150)
        self.work = LayerPass(self.placement, self.scratch, copies)

    def hold(self, hosted, slots=0):
        """A sequence of six blocks, some of whose layers are on the host."""
        seq = Sequence(Request(0, 0.0, 21, 5))
        held = self.placement.held[seq] = Held(slots=[self.gpu.ids.allocate(6) for _ in range(slots)])
        for group in range(4):
            pool, ids = (self.host, held.host) if group in hosted else (self.gpu, held.gpu)
            ids[group] = pool.ids.allocate(6)
        return seq

    def run(self):
        with torch.inference_mode():
            self.work.run(small_decoder(), self.gpu, BlockTables(self.placement), Graphs())
        self.work.abandon()
        self.engine.close()
        assert self.scratch.num_free == 50
        return self.events


@pytest.fixture(params=[False, True], ids=["threads", "inline"])
def watched(request, monkeypatch):
    return Watched(monkeypatch, inline=request.param)


@pytest.mark.parametrize(
    ("hosted", "events"),
    [((), "LLLL"), ((2,), "iLLLoL"), ((0, 2), "iiLoLLoL"), ((0, 1, 3), "iiLoiLoLLo"), ((0, 1, 2, 3), "iiLoiLoiLoLo")],
)
def test_the_copies_of_the_next_two_turns_are_under_way_when_a_layer_of_a_decode_starts(watched, hosted, events):
    watched.work.add_decode(watched.hold(hosted), 22, range(30))
    assert watched.run() == events


def test_all_sequences_have_their_copies_under_way_as_one_a_layer_and_direction(watched):
    for hosted in ((0, 2), (0, 1, 2, 3), ()):
        watched.work.add_decode(watched.hold(hosted), 22, range(30))
    assert watched.run() == "iiLoiLoiLoLo"


def test_what_is_cached_of_a_prompt_is_fetched_ahead_too(watched):
    watched.work.add_chunk(watched.hold((0, 1, 2, 3), slots=2), 13, 8, range(30))
    assert watched.run() == "iiLoiLoiLoLo"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("slow", [*Direction, None])
def test_copies_that_take_their_time_change_no_token(slow, chunked, monkeypatch):
    dice = random.Random(7)
    copy_now = copy_engine.copy_now

    def delayed(src, src_ids, dst, dst_ids, direction):
        if slow in (direction, None) and dice.random() < 0.5:
            time.sleep(dice.random() * 2e-3)
        copy_now(src, src_ids, dst, dst_ids, direction)

    monkeypatch.setattr(copy_engine, "copy_now", delayed)
    serve(chunked)


def test_slots_of_a_pass_that_broke_off_are_given_back_when_its_copies_have_ended(monkeypatch):
    dice = random.Random(1)
    copy_now, layer, release = copy_engine.copy_now, DecoderLayer.attend, LayerPass.release
    broken = []

    def delayed(*arguments):
        time.sleep(1e-3)
        copy_now(*arguments)

    def sometimes(self, *rest, **named):
        if len(rest[1].num_new) > 1 and rest[3] == 1 and dice.random() < 0.3:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return layer(self, *rest, **named)

    def checked(self):
        copies = [copy for member in self.members for copy in (*member.arriving.values(), *member.leaving.values())]
        if self._borrowed:
            assert all(copy.done() for copy in copies)
            broken.append(any(len(member.leaving) < len(member.hosted) for member in self.members))
        release(self)

    monkeypatch.setattr(copy_engine, "copy_now", delayed)
    monkeypatch.setattr(DecoderLayer, "attend", sometimes)
    monkeypatch.setattr(LayerPass, "release", checked)
    serve()
    assert set(broken) == {False, True}
