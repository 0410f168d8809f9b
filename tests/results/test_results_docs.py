"""docs/results.md names every file and field that a run leaves, no other; typed results come back from their files."""

import gzip
import json
import re
from dataclasses import fields, replace
from importlib.util import module_from_spec, spec_from_file_location
from math import inf
from pathlib import Path

import pytest
from msgspec import UNSET
from small_results import CROWDED, counts, finished, scenario, small_result

from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.results.result import RESULT_FILE, SERIES_FILE, assemble, read_result, write_result
from sim.results.sections import Machine, ResolvedScenario, TierUse
from sim.results.timeline import TIMELINE_FILE, write_timeline
from sim.run.files import TABLE_FILES
from sim.run.runs import Recording

ROOT = Path(__file__).parents[2]
FILES = [RESULT_FILE, *TABLE_FILES, SERIES_FILE, TIMELINE_FILE, "figures/"]
FILES += ["scenario.toml", "comparison.json", "comparison.md", "report.html"]
FILES += ["validation.md", "validation.json", "iterations.csv", "twin.png", "against.json", "against.png", "crash.txt"]
SEEN = {
    "counters of layerkv",
    "counters of ellm",
    "counters of hcache and kvpr",
    "counters of fastserve",
    "counters of adaptive",
    "counters of infercept and of stage=tool-calls",
    "counters of speculative decoding",
    "counters of images",
    "counters of pages",
    "counters of swaps",
    "counters of pools",
    "counters of tiers",
    "timeline.json.gz",
    "events",
}
"""Sections whose names are found in runs."""


SPEC = spec_from_file_location("tables", ROOT / "docs" / "tables.py")
assert SPEC is not None
assert SPEC.loader is not None
tables = module_from_spec(SPEC)
SPEC.loader.exec_module(tables)
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
SOURCES = re.findall(r"^#+ ([^\n]+)\n(?:(?!#)[^\n]*\n)*?<!-- ([\w.]+:\w+) -->$", PAGE, flags=re.MULTILINE)
"""Headings, and where the fields are that their tables are made of."""


def documented() -> dict[str, list[str]]:
    """Names in the first columns of the page's tables, by the heading above."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in PAGE.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| `"):
            found.setdefault(heading, []).extend(re.findall(r"`([^`]+)`", line.split(" | ")[0]))
    return found


def test_every_table_is_made_of_fields_or_checked_here():
    assert set(documented()) == dict(SOURCES).keys() | SEEN | {"Files"}


def test_the_page_is_what_the_fields_say():
    assert tables.with_tables(PAGE) == PAGE


def test_the_page_names_every_file():
    assert documented()["Files"] == FILES


POOLS = replace(CROWDED, prefill_replicas=1, decode_replicas=1, link_gbps=100.0)
COUNTED = {
    "layerkv": ["layerkv", "layerkv:decode=stream"],
    "ellm": ["ellm:least-uncached-ratio=0.2"],
    "hcache and kvpr": ["kvpr", "hcache"],
    "fastserve": ["fastserve"],
    "adaptive": ["adaptive:tpot-slo-ms=100"],
    "pages": ["vattention"],
    "swaps": ["vllm-swap:memory=kept-copies"],
    "pools": ["distserve", "memserve", "splitwise:mixed-pool=true,max-pending-tokens=1"],
}


@pytest.mark.parametrize("section", COUNTED)
def test_the_page_names_the_counters_of_systems(section):
    names = documented()[f"counters of {section}"]
    seen: set[str] = set()
    for policy in COUNTED[section]:
        seen |= set(assemble(finished(policy, options=POOLS if section == "pools" else CROWDED)).counters.policy)
    assert seen & set(names)
    shared = documented()["counters of layerkv"] if section == "hcache and kvpr" else []
    assert seen <= {*names, *shared}


def test_the_page_names_no_counter_that_is_not_counted():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "sim").rglob("*.py"))
    named = {name for section in COUNTED for name in documented()[f"counters of {section}"]}
    assert [name for name in sorted(named) if f'"{name}"' not in sources] == []


def test_the_page_names_what_a_timeline_holds(tmp_path):
    write_timeline(tmp_path, finished("layerkv", Recording(timeline=True)))
    trace = json.loads(gzip.decompress((tmp_path / TIMELINE_FILE).read_bytes()))
    assert documented()["timeline.json.gz"] == list(trace)
    assert set(documented()["events"]) == {key for event in trace["traceEvents"] for key in event}


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
