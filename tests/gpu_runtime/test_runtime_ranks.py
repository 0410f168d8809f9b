"""Tensor parallelism: parts that add up to the whole, and processes that serve as one does."""

import os
import signal
import socket
import sys
from _thread import interrupt_main
from dataclasses import replace
from threading import Barrier, Event, Thread, Timer

import msgspec
import pytest
import torch
from runtime_small import SMALL, Runner

from gpu_runtime import ranks
from gpu_runtime.live import LiveOptions, load_decoder, perform
from gpu_runtime.model.config import Experts
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.other_rank import serve_others
from gpu_runtime.ranks import FirstGroup, Group
from gpu_runtime.tokens.trace_prompts import TracePrompts
from sim.errors import InvariantError, UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.traffic import requests_of


class Threads:
    """In the place of `Group`, one for each rank: threads of one process, which put their parts in one list."""

    def __init__(self, rank, parts, barrier):
        self.rank, self.size, self._parts, self._barrier = rank, len(parts), parts, barrier

    def _all(self, part):
        self._parts[self.rank] = part
        self._barrier.wait(300)
        found = list(self._parts)
        self._barrier.wait(300)
        return found

    def sum(self, part):
        return sum(self._all(part.clone()))

    def gather(self, part):
        return torch.cat(self._all(part), dim=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True},
        {"tie_word_embeddings": True, "windows": (3, None, 3, None)},
        {"experts": Experts(4, 2, 24, renormalised=True, named_as_mixtral=True)},
    ],
    ids=["biases", "tied", "experts"],
)
def test_parts_of_a_layer_add_up_to_the_whole(changes):
    """101 tokens are no multiple of 2: the last part of the head is filled up."""
    config, size, new = msgspec.structs.replace(SMALL, **changes), 2, {0: [5, 6, 7, 8], 1: [9], 2: [1, 2]}
    weights = {"device": "cpu", "dtype": torch.float32, "seed": 4}
    whole = Runner(Decoder.random(config, **weights))
    parts, barrier, found = [None] * size, Barrier(size), {}

    def compute(rank):
        group = Threads(rank, parts, barrier)
        runner = Runner(Decoder.random(config, **weights, group=group))
        found[rank] = [runner.step(new), runner.step({1: [3], 2: [4, 5]})]

    threads = [Thread(target=compute, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step, expected in enumerate([whole.step(new), whole.step({1: [3], 2: [4, 5]})]):
        for seq, logits in expected.items():
            torch.testing.assert_close(found[0][step][seq], logits, atol=2e-5, rtol=0)
            assert torch.equal(found[0][step][seq], found[1][step][seq])


CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 80,
 "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 101,
 "max_position_embeddings": 512, "torch_dtype": "float32"}"""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    config = tmp_path_factory.mktemp("small") / "config.json"
    config.write_text(CONFIG)
    return Scenario(
        model=str(config), gpu="cpu", dtype="float32", workload="fixed", input_len=14, output_len=12, num_prompts=10,
        request_rate=200.0, num_gpu_blocks_override=20, num_cpu_blocks_override=4, block_size=4, max_num_seqs=6,
        max_model_len=64, tp=2,
    )  # fmt: skip


@pytest.fixture
def group(scenario):
    started = FirstGroup(scenario, LiveOptions("cpu"), serve_others)
    yield started
    started.close()


def serve(scenario, decoder, variant):
    """The tokens of each request, in order, and the run."""
    setup, tokens = prepare(scenario, *parse_policy(variant, {})), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TracePrompts,
            "hear",
            lambda self, seq, token, _: tokens.setdefault(seq.request.request_id, []).append(token),
        )
        run = perform(setup, requests_of(setup), None, Recording(), decoder, LiveOptions("cpu"))
    return tokens, run


def test_processes_serve_as_one_does(scenario, group, monkeypatch):
    """Preempted, from caches, scheduled ahead; one after the other, then a rank that is lost ends the run."""
    with group.together():
        decoder = load_decoder(scenario.model, scenario.dtype, LiveOptions("cpu"), group)
    alone = load_decoder(scenario.model, scenario.dtype, LiveOptions("cpu"))
    expected, _ = serve(scenario, alone, "vllm-v1")
    assert len(expected) == 10 and decoder.config.num_kv_heads == 1
    for variant in ("vllm-v1", "vllm-recompute", "sarathi"):
        tokens, run = serve(scenario, decoder, variant)
        assert tokens == expected
        assert variant != "vllm-recompute" or run.engines[0].scheduler.counters.preemptions
    aborted = Event()
    monkeypatch.setattr(group, "abort", aborted.set)
    os.kill(group._processes[0].pid, signal.SIGKILL)
    # Also where this rank waits for a GPU, which gloo's broken connections do not wake.
    assert aborted.wait(300)
    with pytest.raises(UserError, match="rank 1 of 2 ended with status -9"):
        serve(scenario, decoder, "vllm-v1")
    assert not group._processes[0].is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="has addresses 127.0.0.x without being told")
def test_other_machines_cannot_join(scenario, monkeypatch):
    """A store listens on all addresses unless it is given a socket; then no other could have its port."""
    made, store = [], ranks.dist.TCPStore
    monkeypatch.setattr(
        ranks.dist, "TCPStore", lambda *args, **options: made.append(store(*args, **options)) or made[0]
    )
    started = FirstGroup(scenario, LiveOptions("cpu"), serve_others)
    try:
        with socket.create_server(("127.0.0.2", made[0].port)):
            pass
    finally:
        started.close()


def test_a_rank_that_hangs_is_ended(scenario, group, monkeypatch):
    """It keeps its connections: the others waited for it for a week."""
    with group.together():
        decoder = load_decoder(scenario.model, scenario.dtype, LiveOptions("cpu"), group)
    monkeypatch.setattr(ranks, "HANG_S", 1.0)
    os.kill(group._processes[0].pid, signal.SIGSTOP)
    with pytest.raises(UserError, match=r"the 2 ranks stand still: .* for 1 s\. All were ended"):
        serve(scenario, decoder, "vllm-v1")
    assert not group._processes[0].is_alive()


def test_an_interrupt_ends_all_ranks_and_keeps_what_is_finished(scenario, group):
    with group.together():
        decoder = load_decoder(scenario.model, scenario.dtype, LiveOptions("cpu"), group)
    slow, timer = replace(scenario, request_rate=2.0), Timer(1.5, interrupt_main)
    # Processes that a shell runs in the background ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    _, run = serve(slow, decoder, "vllm-v1")
    signal.signal(signal.SIGINT, before)
    assert run.interrupted and run.engines[0].log.completed < 10
    assert not group._processes[0].is_alive()


def test_a_rank_that_fails_ends_the_others_with_its_words(group):
    with pytest.raises(UserError, match="rank 1 of 2: AttributeError: 'str' object"), group.together():
        group._others[0].recv()
        group._others[0].send(("no scenario", "", ""))
    assert not group._processes[0].is_alive()


def test_a_rank_that_computes_something_else_says_so(monkeypatch):
    """Else its tokens would be another model's, and nothing would show it."""
    monkeypatch.setattr(ranks.dist, "broadcast", lambda told, source: told.copy_(torch.tensor([0.5, 7.0])))
    rank = Group.__new__(Group)
    assert rank.shared_s(0.1, 7) == 0.5
    with pytest.raises(InvariantError, match="computed other tokens than rank 0"):
        rank.shared_s(0.1, 8)


def test_heads_that_ranks_cannot_share_are_refused():
    with pytest.raises(UserError, match="--tp 4: does not divide the 6 attention heads of small: give another"):
        SMALL.part(4)
