"""A run that is over has given its memory back, although its engine, instance and device are still known."""

import gc
import weakref
from functools import partialmethod

import pytest
import torch

from gpu_runtime.device import TorchDevice
from gpu_runtime.device_memory import DeviceMemory
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.live import LiveOptions, perform
from gpu_runtime.model.decode_graph import DecodeGraph
from kvtwin.testing.live import small_decoder
from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.traffic import traffic
from sim.systems import POLICIES
from traces.errors import TraceError

SCENARIO = Scenario(
    model="qwen3-0.6b", gpu="cpu", dtype="float32", workload="fixed", input_len=9, output_len=5, num_prompts=3,
    num_gpu_blocks_override=40, num_cpu_blocks_override=40, max_model_len=64,
)  # fmt: skip


@pytest.fixture
def tensors(monkeypatch):
    """Whatever pools and graphs a run makes, weakly."""
    made = []

    def watched(kind, name):
        init = kind.__init__

        def noted(self, *rest, **named):
            init(self, *rest, **named)
            made.append(weakref.ref(getattr(self, name)))

        monkeypatch.setattr(kind, "__init__", noted)

    watched(KVPool, "data")
    watched(DecodeGraph, "_logits")
    return made


def capture(compute):
    """A graph that knows addresses alone, as CUDA's does, and computes nothing."""
    compute()
    return lambda: None


def run(requests, monkeypatch):
    policy = POLICIES["vllm-swap"]()
    setup = prepare(SCENARIO, "", policy)
    build = TorchDevice.__init__

    def graphed(self, *rest, **named):
        build(self, *rest, **(named | {"graph_batch_sizes": (1, 2), "capture": capture}))

    monkeypatch.setattr(DeviceMemory, "__init__", partialmethod(DeviceMemory.__init__, spare_blocks=1))
    monkeypatch.setattr(TorchDevice, "__init__", graphed)
    return perform(setup, requests, None, Recording(), small_decoder(), LiveOptions("cpu"))


@pytest.mark.parametrize("fails", [False, True])
def test_pools_and_graphs_are_gone_when_a_run_is_over(tensors, fails, monkeypatch):
    def arriving():
        yield from traffic(SCENARIO)
        if fails:
            raise TraceError("no more of it")

    gc.disable()
    try:
        finished = run(arriving(), monkeypatch)
        assert len(tensors) == 3
        # Not by the collector of cycles, which comes when it likes.
        assert [made() for made in tensors] == [None] * 3
    finally:
        gc.enable()
    assert finished.error == ("no more of it" if fails else None)
    assert finished.instances[0].device.memory.gpu.num_blocks == 41


@pytest.mark.parametrize("part", ["pools", "graphs"])
def test_what_has_no_room_before_the_first_request_is_told_in_a_line(part, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setitem(globals(), "capture", full if part == "graphs" else capture)
    if part == "pools":
        monkeypatch.setattr(KVPool, "__init__", full)
    with pytest.raises(UserError, match=r"^GPU memory: CUDA out of memory. Tried to allocate 2.00 GiB.: lower [^\n]*$"):
        run(traffic(SCENARIO), monkeypatch)
