"""No operation on a device meets another's memory unasked: streams, copies and graphs under CUDA's own rules."""

import sys
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import pretended_kernels
import test_runtime_host_tier as host_tier
import test_runtime_layer_inputs as layer_inputs
import test_runtime_turn_states as turn_states
import test_runtime_uncached_tokens as uncached_tokens
from pretended_cuda import pretended_cuda
from pretended_streams import Event, Stream
from pretended_tensors import OnDevice
from runtime_variants import STREAM, policy_of

from gpu_runtime.device import TorchDevice
from gpu_runtime.kv import batched_copies, copy_engine
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_worker import CopyHandle
from gpu_runtime.kv.transfers import Transfers
from gpu_runtime.model.decoder import Decoder
from kvtwin.testing import live, requests
from kvtwin.testing.live import ALIKE, ROWS, CheckedDevice, small_decoder, tight_limits
from sim.kv.tiers.worth import Worth

SOME = ROWS[:6]


def moved(weights):
    found = {name: getattr(weights, name) for name in weights.__dataclass_fields__}
    return type(weights)(**{name: None if value is None else value.to("cuda") for name, value in found.items()})


@contextmanager
def on_cuda(seed=0, graphs=()):
    """Within, `live.serve` serves on a pretended device, with graphs of so many decodes, and pieces where there are."""
    build, serve = live.build_device, live.serve
    captured = {"graph_batch_sizes": graphs, "piece_sizes": (4, 8, 16) if graphs else ()}

    def build_device(scheduler, *, decoder=None, kind=CheckedDevice, inline_copies=False, **options):
        of = decoder or small_decoder()
        there = Decoder(of.config, [moved(layer.weights) for layer in of.layers], moved(of.ends))
        made = build(scheduler, decoder=there, kind=kind, device="cuda", **captured, **options)
        made.warm_up()
        machine.syncs.clear()
        return made

    def serve_there(policy, arrivals, limit, **options):
        served = serve(policy, arrivals, limit, **options)
        # A thread that asks for tokens afterwards computes them on the CPU.
        served.device.decoder = options.get("decoder") or small_decoder()
        return served

    with torch.inference_mode(), pretended_cuda(seed) as machine, pytest.MonkeyPatch.context() as patch:
        pretended_kernels.stand_in(machine, patch)
        patch.setattr(live, "build_device", build_device)
        patch.setattr(live, "serve", serve_there)
        yield machine


def plainly(variant, **sizes):
    """Serve requests that contend for the pools."""

    def run(patch):
        policy = policy_of(variant)
        return live.serve(policy, requests(*SOME), tight_limits(policy, **sizes)), requests(*SOME)

    return run


def ahead(patch):
    """Each iteration is launched while the one before runs, and reads what that one has chosen."""
    policy = policy_of("vllm-v1").with_async_scheduling(True)
    return live.serve(policy, requests(*SOME), tight_limits(policy, gpu=24, chunked=True)), requests(*SOME)


def tiered(patch):
    """KV of ended turns comes back layer by layer."""
    patch.setattr(Worth, "load_s", lambda self, num_blocks: 0.0)
    policy, arrivals = policy_of("cachedattention:disk-space=0"), host_tier.spread(ALIKE[:8])
    return live.serve(policy, arrivals, tight_limits(policy, gpu=18, host=40)), arrivals


def turns(patch):
    """KV is made from states of ended turns."""
    arrivals = host_tier.spread(ALIKE[:8])
    return turn_states.serve(patch, arrivals=arrivals), arrivals


def retained(patch):
    """Chunks leave for the host, some give way before they are there, and come back with gaps."""
    patch.setattr(Worth, "load_s", lambda self, num_blocks: 0.0)
    policy, arrivals = policy_of("pensieve:swap-out-threshold=0.8"), host_tier.spread(ALIKE[:8], gap_s=0.0)
    return live.serve(policy, arrivals, tight_limits(policy, gpu=17, host=60, seqs=3)), arrivals


def projecting(patch):
    """KV is made from inputs in part."""
    rows = live.GROWING[:5]
    return layer_inputs.serve(patch, "a part", rows), requests(*rows)


def rebuilding(patch):
    """KV is computed again in the first layers and copied into the others."""
    rows, choices = live.GROWING[:2], uncached_tokens.at_random(3)
    return uncached_tokens.serve(patch, choices, rows), requests(*rows)


WORK = {
    "vllm": plainly("vllm-recompute", gpu=60), "ahead": ahead, "swap": plainly("vllm-swap"),
    "fastserve": plainly("fastserve", seqs=2), "layerkv": plainly("layerkv"), "stream": plainly(STREAM),
    "chunks": plainly(STREAM, chunked=True), "hcache": plainly("hcache"), "tiered": tiered, "turns": turns,
    "retained": retained, "projecting": projecting, "rebuilding": rebuilding,
}  # fmt: skip


def serve(work, *, seed=0, graphs=(1, 2, 4)):
    """What was found, what the host waited for while it served, what it served, and the requests."""
    with on_cuda(seed, graphs) as machine, pytest.MonkeyPatch.context() as patch:
        served, arrivals = WORK[work](patch)
        return list(machine.order.found), list(machine.syncs), served, arrivals


@pytest.mark.parametrize("work", WORK)
def test_nothing_is_read_or_written_too_early(work):
    """And the host waits for tokens alone: sending from pageable memory would hold it up until its stream is done."""
    found, waits, served, arrivals = serve(work)
    assert found == []
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)
    assert len(waits) <= len(served.plans), waits


WAITS = [
    (CopyHandle, "wait"), (CopyHandle, "wait_in_stream"), (KVCopies, "wait"), (KVCopies, "wait_in_stream"),
    (KVCopies, "went_well"), (Transfers, "wait"), (Stream, "wait_event"), (Stream, "wait_stream"),
    (Stream, "synchronize"), (Event, "synchronize"), (OnDevice, "record_stream"),
]  # fmt: skip
"""What makes one wait for another, or memory."""
NEEDED = {
    "CopyHandle.wait": "swap",
    "CopyHandle.wait_in_stream": "stream",
    "CopyWorker._on_stream": "stream",
    "CudaCapture.__call__": "stream",
    "KVCopies.start_after": "stream",
    "_failures": "swap",
    "KVCopies.wait_in_stream": "stream",
    "LayerPass._before_layer": "stream",
    "Computation._finish_copies": "stream",
    "TorchDevice.launch": "swap",
    "wait": "ahead",
    "CopyEngine.copy_rows.<locals>.job": "hcache",
    "LiveStates.restore": "hcache",
    "LiveStates.await_saved": "hcache",
    "TurnStates.await_saved": "turns",
    "Transfers.begin": "retained",
    "TorchDevice._await_copies": "retained",
    "ProjectingPass._before_layer": "projecting",
    "RebuildingPass._before_layer": "rebuilding",
    "run_copies": "swap",
}
"""Functions that wait, and work in which something would come too early if they did not."""


class NoticedError(Exception):
    """Nothing more need be served."""


@pytest.mark.parametrize("function", NEEDED)
def test_each_wait_that_is_left_out_is_noticed(function, monkeypatch):
    def unless_asked_by_it(right):
        def wait(*arguments):
            code = sys._getframe(1).f_code
            return True if "gpu_runtime/" in code.co_filename and code.co_qualname == function else right(*arguments)

        return wait

    for owner, name in WAITS:
        monkeypatch.setattr(owner, name, unless_asked_by_it(getattr(owner, name)))
    launch = CheckedDevice.launch
    with on_cuda(graphs=(1, 2, 4)) as machine:

        def until_noticed(self, plan):
            if machine.order.found:
                raise NoticedError
            launch(self, plan)

        monkeypatch.setattr(CheckedDevice, "launch", until_noticed)
        with suppress(NoticedError):
            WORK[NEEDED[function]](monkeypatch)
        assert machine.order.found


@pytest.mark.parametrize("work", ["vllm", "ahead"])
def test_a_graph_that_is_launched_twice_in_an_iteration_spoils_nothing(monkeypatch, work):
    """Where memory runs out behind a graph its parts are launched at once: neither what is sent to it may be written
    meanwhile, nor may what it chose before be lost."""
    choose, failed = TorchDevice._choose, []

    def of_few(self, scores, seqs, positions):
        if len(seqs) > 2:
            failed.append(len(seqs))
            raise torch.OutOfMemoryError("tried to allocate too much")
        return choose(self, scores, seqs, positions)

    monkeypatch.setattr(TorchDevice, "_choose", of_few)
    found, _, served, arrivals = serve(work)
    assert found == [] and len(failed) > 3
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)


@pytest.mark.parametrize("pinned", [True, False])
def test_the_driver_s_batches_are_for_page_locked_memory(monkeypatch, pinned):
    batches = []
    with torch.inference_mode(), pretended_cuda() as machine:
        source, target = torch.randn(8, 5).to("cuda"), torch.zeros(8, 5, pin_memory=pinned)
        copied = batched_copies.copy_pieces
        monkeypatch.setattr(batched_copies, "copy_pieces", lambda *these: batches.append(1) or copied(*these))
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(machine._default)
            copy_engine._copy_runs(source, np.arange(8), target, np.array([7, 5, 3, 1, 0, 2, 4, 6]))
        torch.cuda.synchronize()
        assert torch.equal(target[[7, 5, 3, 1, 0, 2, 4, 6]], source.cpu())
        assert machine.order.found == []
    assert bool(batches) == pinned
