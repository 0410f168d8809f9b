"""Kernels chosen by a measurement: the faster ones, the first in a tie, and in words."""

import json
from types import SimpleNamespace

import pytest
import torch

from gpu_runtime.live import LiveOptions, describe_machine, load_decoder
from gpu_runtime.machine import fastest_kernels
from gpu_runtime.machine.fastest_kernels import fastest
from gpu_runtime.model.kernels import Kernels
from kvtwin.testing.live import small_decoder


class Timed(Kernels):
    """Takes a made-up time for each batch, on a made-up clock; of decodes, of a prompt, of both."""

    clock_s = 0.0

    def __init__(self, *seconds):
        self._seconds = seconds

    def attend(self, query, pool, layer, batch, new):
        kind = 0 if batch.max_query_len == 1 else 1 if len(batch.num_new) == 1 else 2
        Timed.clock_s += self._seconds[kind]
        return torch.zeros_like(query)


@pytest.fixture
def decoder(monkeypatch):
    monkeypatch.setattr(fastest_kernels, "perf_counter", lambda: Timed.clock_s)
    yield small_decoder()
    small_decoder().compute_with(Kernels())


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ((1.0, 2.0, 4.0), "ours"),
        ((0.99, 1.98, 3.96), "ours"),
        ((0.5, 2.0, 4.0), "theirs"),
        ((0.5, 4.0, 4.0), "ours"),
        ((0.25, 4.0, 4.0), "theirs"),
    ],
    ids=["tie", "chance", "faster", "even", "faster on the whole"],
)
def test_the_fastest_on_the_whole_computes_and_a_tie_changes_nothing(other, chosen, decoder):
    both = {"ours": Timed(1.0, 2.0, 4.0), "theirs": Timed(*other)}
    assert fastest(decoder, both) is both[chosen]


def test_ranks_take_what_the_first_one_found_fastest(decoder, monkeypatch):
    """A rank's own measurement may go the other way, and its tokens would be other kernels'."""
    first = {1.0: [1.0, 2.0, 4.0], 0.5: [2.0, 4.0, 8.0]}
    monkeypatch.setattr(decoder, "group", SimpleNamespace(of_first=lambda found: first[found[0]]))
    both = {"ours": Timed(1.0, 2.0, 4.0), "theirs": Timed(0.5, 1.0, 2.0)}
    assert fastest(decoder, both) is both["ours"]


def test_the_choice_says_by_how_much(decoder):
    """By hand: half the time of one batch of three, and the same of the others, is 0.5^(1/3), or 1 / 1.26."""
    found = fastest(decoder, {"ours": Timed(1.0, 2.0, 4.0), "theirs": Timed(0.5, 2.0, 4.0)})
    assert found.why == "chosen by a measurement: ours took 1.26 times as long"


def test_on_a_cpu_there_is_one_and_the_result_says_so(tmp_path):
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 1}
    more = {"intermediate_size": 80, "vocab_size": 101, "max_position_embeddings": 64, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | more))
    decoder = load_decoder(str(tmp_path), "float32", LiveOptions("cpu", attention_backend="fastest"))
    assert describe_machine(decoder).attention == "torch (no others here)"
