"""Presets that schedule for vLLM decide as they do in the simulator: in a pretended vLLM, and in vLLM's engine core.

`validation/vllm_scheduler.py` asks the same of vLLM 0.33 itself on many more workloads.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from pretended_vllm import Core
from scheduler_replay import PLAIN, facts_of, requests_of, simulated
from v1_replay import read_case

import kvtwin.vllm
from kvtwin.vllm.settings import EngineFacts, make_setup, read_settings
from sim.errors import UserError
from sim.version import is_compiled
from traces.request import Request

pytestmark = pytest.mark.skipif(is_compiled(), reason="kvtwin.vllm refuses to run compiled")
CASES = Path(__file__).parent / "cases_v1"
MACHINE = {"model": "llama-3.1-8b", "gpu": "l20"}
TIGHT = "ttft-slo-ms=300,tpot-slo-ms=40"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
"""Made with `vllm_v1_oracle.py`'s recipe; without vLLM's compiled kernels its scheduler runs on a CPU."""


def asked_of(case: str, *, ahead: bool) -> tuple[list[Request], EngineFacts]:
    """A stored workload and the settings that it runs under."""
    answer = read_case(CASES / f"{case}.json.gz")
    facts = facts_of(answer["args"] | PLAIN | {"async_scheduling": ahead})
    return requests_of(answer["workload"], facts), facts


@pytest.mark.parametrize(
    ("case", "ahead", "policy"),
    [
        ("00064", True, "vllm-v1"),
        ("00022", False, f"adaptive:{TIGHT}"),
        ("00002", True, f"adaptive:{TIGHT}"),
        # An answer's last token fills its block, which is hashed as it ends.
        ("01060", True, f"adaptive:{TIGHT},predictor=oracle"),
        ("01205", False, "vllm-v1:order=lpm"),
        ("00518", False, "sarathi"),
    ],
)
def test_a_preset_decides_in_a_pretended_vllm_as_in_the_simulator(case: str, ahead: bool, policy: str) -> None:
    requests, facts = asked_of(case, ahead=ahead)
    told = MACHINE | {"policy": policy}
    want = simulated(requests, facts, told)
    assert want.difference(Core(requests, facts, told).run(), "simulated", "in vLLM") == ""
    assert want.preempted


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_that_end_early_and_clients_that_leave_give_their_blocks_back(ahead: bool) -> None:
    # vLLM ends these itself, at any place: waiting, half prefilled, decoding, with its last token in flight.
    requests, facts = asked_of("00073", ahead=ahead)
    core = Core(requests, facts, MACHINE | {"policy": f"adaptive:{TIGHT}"})
    core.stops = {i: 1 + i % 7 for i in range(0, len(requests), 2)}
    core.leaves = {i: 10 + 9 * i for i in range(1, len(requests), 4)}
    found = core.run()
    scheduler = core.driver.engine.scheduler
    assert len(core.manager.free_blocks) == facts.num_gpu_blocks
    assert not scheduler.has_unfinished and not core.driver.memory.requests
    assert all(core.asked[i].num_output_tokens == min(n, requests[i].output_tokens) for i, n in core.stops.items())
    assert sum(i not in found.finish_s for i in core.leaves) > 0


@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM 0.33, in the environment that vllm_v1_oracle.py describes")
@pytest.mark.parametrize("ahead", [False, True])
def test_adaptive_decides_in_vllms_engine_core_as_in_the_simulator(ahead: bool) -> None:
    from vllm_core import Core as EngineCore  # noqa: PLC0415

    requests, facts = asked_of("00002", ahead=ahead)
    told = MACHINE | {"policy": f"adaptive:{TIGHT},predictor=oracle"}
    found = EngineCore(requests, facts, "kvtwin.vllm.Preset", told).run()
    assert simulated(requests, facts, told).difference(found, "simulated", "in vLLM") == ""


@pytest.mark.parametrize(
    ("told", "word"),
    [
        ({"gpu": "l20"}, "kvtwin.policy: not given"),
        ({"policy": "vllm-v1"}, "kvtwin.gpu: not given"),
        ({"policy": "vllm-v1", "gpu": "l20", "slo": 3}, "kvtwin.slo: no such option"),
        ({"policy": "sarathi", "gpu": "l20"}, "--no-async-scheduling"),
        ({"policy": "layerkv", "gpu": "l20"}, "memory=layers"),
        ({"policy": "vllm-v1:eviction=swap,order=fcfs", "gpu": "l20"}, "eviction=swap"),
    ],
)
def test_what_vllm_cannot_carry_out_is_refused(told: dict, word: str) -> None:
    requests, facts = asked_of("00064", ahead=told.get("policy") not in ("layerkv",))
    with pytest.raises(UserError, match=word):
        Core(requests, facts, read_settings({"kvtwin": {"model": "llama-3.1-8b"} | told}))


def test_vllms_options_that_a_preset_lacks_are_refused() -> None:
    _, facts = asked_of("00064", ahead=False)
    facts = replace(facts, options={**facts.options, "watermark": 0.1})
    with pytest.raises(UserError, match=r"--watermark 0\.1: adaptive has no such option"):
        make_setup(MACHINE, facts, "adaptive")


@pytest.mark.skipif(HAS_VLLM, reason="says what is missing where vLLM is")
def test_without_vllm_its_absence_is_what_is_said() -> None:
    with pytest.raises(UserError, match="vLLM is not installed"):
        kvtwin.vllm.Adaptive  # noqa: B018
