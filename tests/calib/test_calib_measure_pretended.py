"""What measuring asks of CUDA, and in which order, with events, streams and a driver that only pretend."""

import subprocess
from types import SimpleNamespace

import pytest
import torch
from measure_small import GPU

from calib.measure import bench, clocks, copy_ops, graphs, machine
from calib.measure.bench import Bench
from calib.measure.clocks import CudaClock, Unmeasurable
from calib.measure.plan import Plan
from calib.measure.points import Point
from calib.measure.timing import Rule

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Told(list):
    """What was asked, in order. Time passes where `work` is done: 4 ms on the device."""

    now_s = 0.0

    def work(self):
        self.append("work")
        self.now_s += 4e-3


@pytest.fixture
def told(monkeypatch):
    log = Told()

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing  # else CUDA refuses the time between two
            self.at_s = None

        def record(self):
            self.at_s = log.now_s
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return 1e3 * (other.at_s - self.at_s)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: log.append("synchronize"))
    monkeypatch.setattr(clocks, "perf_counter_ns", lambda: round(log.now_s * 1e9))
    monkeypatch.setattr(clocks, "perf_counter", lambda: log.now_s)
    return log


class Written:
    """A buffer that tells when it is written; a writing of `seconds` on the device."""

    def __init__(self, log, size, seconds=0.0):
        self.log, self.size, self.seconds = log, size, seconds

    def zero_(self):
        self.log.append(f"write {self.size}")
        self.log.now_s += self.seconds

    def __getitem__(self, part):
        return Written(self.log, part.stop)


def clock_of(told, monkeypatch, cache_bytes=100 * 2**20, write_s=1e-3):
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: Written(told, size, write_s))
    clock = CudaClock(CUDA, cache_bytes)
    told.clear()
    return clock


def test_the_device_is_timed_from_event_to_event_and_the_host_until_all_is_done(told, monkeypatch):
    clock = clock_of(told, monkeypatch, write_s=1e-3)
    assert clock.device_s(told.work, lead=False) == pytest.approx(4e-3)
    assert told == [f"write {200 * 2**20}", "synchronize", "record", "work", "record", "wait"]
    told.clear()
    assert clock.host_s(told.work) == pytest.approx(4e-3)
    assert told == [f"write {200 * 2**20}", "synchronize", "work", "synchronize"]


# -- all-reduces and graphs --------------------------------------------------------------------------------------------


def test_what_cannot_be_captured_is_unmeasurable_and_a_lack_of_memory_is_not():
    with pytest.raises(Unmeasurable) as caught, graphs.telling_capture():
        raise RuntimeError("operation not permitted\nmore")
    assert str(caught.value) == "cannot be captured in a CUDA graph (operation not permitted)"
    with pytest.raises(torch.OutOfMemoryError), graphs.telling_capture():
        raise torch.OutOfMemoryError("no room")


def small_bench():
    plan = Plan(points=[], left_out={}, built_layers={}, kv_blocks={}, longest={}, copy_bytes=1)
    return Bench(plan, {}, GPU, CPU, torch.float32, 0)


def test_once_a_capture_has_failed_no_other_is_tried(monkeypatch):
    tried = []

    def refuse(work, stream):
        tried.append(stream)
        raise Unmeasurable("cannot be captured")

    monkeypatch.setattr(bench, "captured", refuse)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    found = small_bench()
    for _ in range(2):
        with pytest.raises(Unmeasurable, match=r"^cannot be captured$"):
            found.measure(Point(op="launch", graph=1), Rule(warmup_s=0.0))
    assert tried == ["a stream"]
    # Without a graph there is nothing to capture.
    assert len(found.measure(Point(op="launch", num_copies=3), Rule(max_repeats=7, budget_s=0.0))) == 5


def test_all_graphs_are_captured_on_one_stream(monkeypatch):
    """Libraries keep a workspace, of 32 MB on Hopper, for each stream that they have seen."""
    made, used = [], []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or len(made))
    monkeypatch.setattr(bench, "captured", lambda work, stream: used.append(stream) or work)
    found = small_bench()
    for count in (1, 2, 3):
        found.measure(Point(op="launch", num_copies=count, graph=1), Rule(max_repeats=3, budget_s=0.0))
    assert (made, used) == ([CPU], [1, 1, 1])


def test_an_all_reduce_asks_the_gpu_that_is_timed_last(told, monkeypatch):
    """Else its event fires while the others are still being asked: 28 to 56 us early with eight."""

    class Lead:
        def __init__(self, rank):
            self.rank = rank

        def zero_(self):
            told.append(f"lead {self.rank}")

    reduction = object.__new__(copy_ops.AllReduce)
    reduction._devices, reduction._parts, reduction._sums = [CUDA], [], []
    reduction._leads = [Lead(rank) for rank in range(3)]
    monkeypatch.setattr(copy_ops.nccl, "all_reduce", lambda parts, sums: told.work())
    assert reduction.once() == pytest.approx(4e-3)
    assert told == ["synchronize", "lead 2", "lead 1", "lead 0", "record", "work", "record", "synchronize"]


# -- the driver --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU; the program answers what it was asked."""
    found = SimpleNamespace(major=9, minor=0, uuid="", status=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(machine, "device_name", lambda kind: "card")
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}")

    def answer(command, **options):
        assert options == {"capture_output": True, "text": True, "timeout": 20.0, "check": False}
        found.command = command
        return SimpleNamespace(returncode=found.status, stdout=" 555.42 \nother\n")

    monkeypatch.setattr(machine.subprocess, "run", answer)
    return found


def test_a_driver_that_does_not_answer_says_nothing(gpu, monkeypatch):
    for device, uuid, which in (("cuda:3", "", "3"), ("cuda", "", "0"), ("cuda:3", "12-34", "GPU-12-34")):
        gpu.uuid = uuid
        assert machine._smi(torch.device(device), "x") == "555.42"
        assert gpu.command[-2:] == ["-i", which]
    gpu.status = 1
    assert machine._smi(CUDA, "x") == ""
    for error in (OSError("gone"), subprocess.TimeoutExpired("nvidia-smi", 20.0)):
        monkeypatch.setattr(machine.subprocess, "run", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        assert machine._smi(CUDA, "x") == ""
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: pytest.fail("asked nobody"))
    assert machine._smi(CUDA, "x") == ""


def test_a_calibration_times_the_flash_attention_that_serves(gpu, monkeypatch):
    """It timed torch's own where the live runtime activates a newer one; the profile's provenance names it."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    activated = {"activate": asked.append, "current": lambda: (asked or [None])[-1]}
    for verb, found in activated.items():
        monkeypatch.setattr(torch.nn.attention, f"{verb}_flash_attention_impl", found, raising=False)
    facts = machine.device_facts(CUDA)
    assert (facts["attention_backend"], facts["flash_attention"], asked) == ("triton", "FA3", ["FA3"])
