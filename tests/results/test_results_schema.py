"""The typed result: it comes back from its file unchanged, and its parts follow what they describe."""

import json
from dataclasses import fields, replace
from math import inf

import pytest
from msgspec import UNSET
from small_results import CROWDED, counts, finished, scenario, small_result

from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.results.result import assemble, read_result, write_result
from sim.results.sections import Machine, ResolvedScenario, TierUse
from sim.run.runs import Recording

MACHINE = Machine(device="cpu", torch="2", dtype="float32", threads="1")


@pytest.mark.parametrize(("policy", "detailed"), [("vllm-swap", True), ("layerkv", False)])
def test_a_result_comes_back_from_its_file_as_it_was(tmp_path, policy, detailed):
    result = assemble(finished(policy, Recording(detailed=detailed)))
    assert read_result(write_result(tmp_path, result)) == result
    assert (result.itls is not UNSET) is detailed
    assert bool(result.counters.policy) is (policy == "layerkv")


HOST = TierUse(
    tier="host", num_blocks=9, hit_tokens=48, num_loads=2, stored_blocks=5, evicted_blocks=0, saved_s=0.5, lost_s=0.0
)


def test_an_infinite_rate_and_what_is_seldom_there_come_back(tmp_path):
    everything = small_result(
        request_rate=inf, scenario=scenario(request_rate=inf), error="bad row", machine=MACHINE, complete=False,
        counters=counts(parked=3), per_request="elsewhere", tiers=[HOST],
    )  # fmt: skip
    path = write_result(tmp_path, everything)
    data = json.loads(path.read_text())
    assert data["request_rate"] == data["scenario"]["request_rate"] == "inf"
    assert data["counters"] == {
        "swap_out_blocks": 0, "swap_in_blocks": 0, "swap_space_exhausted": 0, "prefix_query_tokens": 0,
        "prefix_hit_tokens": 0, "prefix_rehit_tokens": 0, "prefix_evicted_blocks": 0, "ignored": {}, "parked": 3,
    }  # fmt: skip
    assert list(data)[6] == "error"
    assert list(data)[-3:] == ["versions", "machine", "per_request"]
    assert read_result(path) == everything


def test_what_is_not_there_is_no_key(tmp_path):
    data = json.loads(write_result(tmp_path, small_result()).read_text())
    assert not {"error", "machine", "per_request", "itls", "ttfts"} & set(data)
    assert set(data["profile"]) == {"name", "status", "sha256"}
    assert data["mean_ttft_ms"] is None


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda data: data.pop("duration"), ["duration"]),
        (lambda data: data.update(completed="many"), ["completed", "'many'"]),
        (lambda data: data["scenario"].pop("gpu"), ["scenario", "gpu"]),
        (lambda data: data["counters"].update(parked="often"), ["counters"]),
        (lambda data: data.update(counters=[]), ["counters"]),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_field(tmp_path, change, parts):
    path = write_result(tmp_path, small_result())
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UserError) as refused:
        read_result(path)
    assert all(part in str(refused.value) for part in [str(path), *parts])


def test_the_scenario_of_a_result_has_every_option_of_a_scenario_and_what_it_resolved_to():
    resolved = ["policy", "policy_options", "policy_parts", "num_gpu_blocks", "num_cpu_blocks", "block_bytes"]
    assert [f.name for f in fields(ResolvedScenario)] == [f.name for f in fields(Scenario)] + resolved
    options = replace(CROWDED, num_prompts=1, max_model_len=None, enable_chunked_prefill=True)
    found = assemble(finished("layerkv", options=options)).scenario
    assert (found.max_model_len, found.max_num_batched_tokens, found.enable_chunked_prefill) == (4096, 512, True)
    assert (found.policy, found.policy_options["slo_aware"], found.goodput) == ("layerkv", True, ("ttft:3000",))
