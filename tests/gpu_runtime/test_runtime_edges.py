"""Small duties of the live half: what it starts from, what it leaves, and what its checks find out."""

import gzip
import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from runtime_variants import policy_of

import kvtwin
from gpu_runtime import live
from gpu_runtime.kv.copy_worker import CopyFailed, CopyHandle, CopyWorker
from gpu_runtime.live import LiveOptions, check_lengths, perform
from gpu_runtime.measured.executed import Executed, Moved
from gpu_runtime.twin import validate
from kvtwin.testing.live import small_decoder
from sim.engine.changes import Direction, Move, Restore, Tier
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError, UserError
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.traffic import traffic
from sim.systems import POLICIES
from traces.request import Request


def test_an_interrupt_is_python_s_to_handle_again(monkeypatch):
    """The first one ends the run and keeps what is finished; another ends the process while its files are written."""
    ended, scenario = [], Scenario(gpu="cpu", workload="fixed", num_prompts=2, input_len=9, output_len=4)

    def interrupted(instance):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    device = SimpleNamespace(
        memory=SimpleNamespace(engine=SimpleNamespace(spans=SimpleNamespace(take=list))),
        warm_up=lambda: ended.append("warm"),
        start=lambda: ended.append("started"),
        close=lambda: ended.append("closed"),
    )
    monkeypatch.setattr(live, "build_device", lambda *_: device)
    monkeypatch.setattr(live.LiveInstance, "serve", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        setup = prepare(scenario, "vllm-recompute", policy_of("vllm-recompute"))
        run = live.perform(setup, [], None, Recording(), small_decoder(), live.LiveOptions("cpu"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.interrupted and ended == ["warm", "started", "closed"]


def test_validate_leaves_one_timeline_and_nothing_of_earlier_runs(tmp_path, monkeypatch):
    drawn = []
    draw = validate.draw_twin
    monkeypatch.setattr(validate, "draw_twin", lambda *parts: drawn.append(parts) or draw(*parts))
    monkeypatch.setattr("gpu_runtime.twin.probe.machine_slowness", lambda *_: 1.0)
    config, out = tmp_path / "config.json", tmp_path / "out"
    shape = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64}
    config.write_text(json.dumps(shape))
    words = f"validate --device cpu --model {config} --gpu cpu --workload fixed --input-len 9 --output-len 4 --quiet"
    words += " --request-rate 200 --num-prompts 3 --num-gpu-blocks-override 9 --max-model-len 64 --swap-space 0.01"
    words += f" --policy vllm-recompute --runs 1 --out {out}"
    kvtwin.main([*words.split(), "--timeline"])
    place, name = out / "vllm-recompute", "timeline.json.gz"
    files = [place / name, place / "simulated" / name, place / "live-1" / name]
    merged, *alone = (len(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]) for path in files)
    assert merged == sum(alone) > 0
    kvtwin.main(words.split())
    assert not list(place.rglob(name))
    for label, simulated, executed, *_ in drawn:
        assert (label, len(executed)) == ("vllm-recompute", 1)
        assert all(len(one.series["time_s"]) for one in (simulated, *executed))
    assert len(drawn) == 2


def test_nothing_of_a_failed_copy_is_under_way_when_its_failure_is_known():
    said = []
    worker, handle = CopyWorker.__new__(CopyWorker), CopyHandle()
    worker.stream = SimpleNamespace(synchronize=lambda: said.append(f"settled, known: {handle.done()}"))

    def fail():
        raise RuntimeError("the link is gone")

    worker._carry_out(fail, handle)
    assert said == ["settled, known: False"]
    with pytest.raises(CopyFailed, match="the link is gone"):
        handle.wait()
    well = CopyHandle()
    worker._carry_out(lambda: None, well)
    assert len(said) == 1 and well.done()


SEQ, OTHER = (Sequence(Request(number, 0.0, 10, 5)) for number in range(2))
BACK = Restore(SEQ, 10, (0,), (1, 2), (), 6)
"""Of three layers one is projected and two are copied."""
OUT = Move(SEQ, (0, 1), 0, 10, Tier.GPU, Tier.HOST, 6, 6, True)
WENT = Moved(SEQ, (0, 1), Direction.D2H, 6)


def planned(**parts):
    """A plan of these parts."""
    plan = IterationPlan()
    for name, value in parts.items():
        setattr(plan, name, value)
    return plan


RIGHT = {
    "computed back": ((BACK,), (), [BACK], [], ()),
    "none came back that was given up": ((BACK,), (), [], [], (SEQ,)),
    "copies of what was given up count": ((OUT,), (), [WENT], [], (SEQ,)),
    "those behind a prefill do not": ((), (OUT,), [], [WENT], (SEQ,)),
    "of others they do": ((BACK, OUT), (), [BACK, WENT], [], (OTHER,)),
}
WRONG = {
    "not computed back": ((BACK,), (), [], [], ()),
    "what was not given up did not come back": ((BACK,), (), [], [], (OTHER,)),
    "what was given up went out unplanned": ((), (), [WENT], [], (SEQ,)),
    "a copy of what was given up is missing": ((OUT,), (), [], [], (SEQ,)),
    "nothing left behind a prefill": ((), (OUT,), [], [], (OTHER,)),
    "more left behind a prefill": ((), (), [], [WENT], ()),
}


@pytest.mark.parametrize(
    ("case", "holds"), [*((c, True) for c in RIGHT.values()), *((c, False) for c in WRONG.values())]
)
def test_what_was_executed_is_what_was_planned(case, holds):
    changes, behind, moves, sent, given_up = case
    plan = planned(changes=changes, behind=behind)
    done = Executed(moves=moves, behind=sent, given_up=set(given_up))
    # Of copies behind prefills no inputs are saved.
    plan.behind_blocks = sum(move.num_blocks for move in behind)
    if holds:
        done.check(plan)
    else:
        with pytest.raises(InvariantError, match=r"executed, .* planned"):
            done.check(plan)


SCENARIO = Scenario(
    model="qwen3-0.6b", gpu="cpu", dtype="float32", workload="fixed", input_len=9, output_len=504, num_prompts=2,
    num_gpu_blocks_override=80, num_cpu_blocks_override=40, max_model_len=512,
)  # fmt: skip


def run(name, scenario=SCENARIO):
    setup = prepare(scenario, "", POLICIES[name]())
    check_lengths(setup, small_decoder().config)
    return perform(setup, traffic(scenario), None, Recording(), small_decoder(), LiveOptions("cpu"))


@pytest.mark.parametrize("name", ["vllm-recompute", "layerkv"])
def test_a_request_beyond_the_last_position_is_refused_where_the_policy_does_not_stop(name):
    message = r"request 0: 9 \+ 504 tokens, small has 512 positions and the policy does not stop there: give --clip 512"
    with pytest.raises(UserError, match=message):
        run(name)


def test_clipped_as_the_message_says_it_is_served_to_the_last_position():
    served = run("vllm-recompute", replace(SCENARIO, clip=512, num_prompts=1))
    assert served.log.completed == 1


def test_a_policy_that_stops_at_the_context_length_stops_there():
    served = run("vllm-v1", replace(SCENARIO, num_prompts=1, max_model_len=40))
    assert (served.log.completed, served.error) == (1, None)
