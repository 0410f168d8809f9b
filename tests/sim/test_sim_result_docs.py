"""docs/results.md names every file and field that a run leaves, and none that does not exist."""

import gzip
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from small_results import CROWDED, finished

from gpu_runtime.twin.against import Against, Compared, WorstRequest
from gpu_runtime.twin.agreement import Agreement, Validation
from gpu_runtime.twin.iterations import COLUMNS as ITERATION_COLUMNS
from gpu_runtime.twin.iterations import Difference, IterationAgreement, KindAgreement
from sim.results.figures import FIGURES
from sim.results.metrics import ENGINE_COLUMNS, TABLE_COLUMNS
from sim.results.parts import (
    Counts,
    EngineUse,
    LanesUse,
    LaneUse,
    LatencyParts,
    Machine,
    ResolvedScenario,
    TierUse,
    UsedEngineProfile,
    UsedProfile,
    Versions,
)
from sim.results.report import METRICS
from sim.results.result import RESULT_FILE, SERIES_FILE, assemble
from sim.results.schema import Comparison, Result
from sim.results.series import COLUMNS
from sim.results.timeline import TIMELINE_FILE, write_timeline
from sim.run_files import TABLE_FILES
from sim.runs import Recording

ROOT = Path(__file__).parents[2]
FILES = [RESULT_FILE, *TABLE_FILES, SERIES_FILE, TIMELINE_FILE, "figures/"]
FILES += ["scenario.toml", "comparison.json", "comparison.md", "report.html"]
FILES += ["validation.md", "validation.json", "iterations.csv", "twin.png", "against.json", "against.png", "crash.txt"]
NAMES = {
    "Files": FILES,
    "result.json": Result.__struct_encode_fields__,
    "counters": [name for name in Counts.__struct_encode_fields__ if name != "policy"],
    "latency_parts": LatencyParts.__struct_encode_fields__,
    "lanes": LanesUse.__struct_encode_fields__,
    "each lane": LaneUse.__struct_encode_fields__,
    "each tier": TierUse.__struct_encode_fields__,
    "each engine": EngineUse.__struct_encode_fields__,
    "further columns of several engines": ENGINE_COLUMNS,
    "scenario": [f.name for f in fields(ResolvedScenario)],
    "profile": UsedProfile.__struct_encode_fields__,
    "engine_profile": UsedEngineProfile.__struct_encode_fields__,
    "versions": Versions.__struct_encode_fields__,
    "machine": Machine.__struct_encode_fields__,
    "requests.csv and requests.parquet": TABLE_COLUMNS,
    "series.csv": COLUMNS,
    "figures/": FIGURES,
    "comparison.json": Comparison.__struct_encode_fields__,
    "metrics": [metric.key for metric in METRICS],
    "validation.json": Validation.__struct_encode_fields__,
    "each metric of validate": Agreement.__struct_encode_fields__,
    "iterations of validate": IterationAgreement.__struct_encode_fields__,
    "each kind": KindAgreement.__struct_encode_fields__,
    "each difference": Difference.__struct_encode_fields__,
    "iterations.csv": ITERATION_COLUMNS,
    "against.json": Against.__struct_encode_fields__,
    "each metric": Compared.__struct_encode_fields__,
    "each request": WorstRequest.__struct_encode_fields__,
}
"""Sections of the page with a table, and the names that its first column must hold, in order."""
SEEN = {
    "counters of layerkv",
    "counters of ellm",
    "counters of hcache and kvpr",
    "counters of fastserve",
    "counters of adaptive",
    "counters of pools",
    "counters of tiers",
    "timeline.json.gz",
    "events",
}
"""Sections whose names are found in runs."""


def documented() -> dict[str, list[str]]:
    """Names in the first columns of the page's tables, by the heading above."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| `"):
            found.setdefault(heading, []).extend(re.findall(r"`([^`]+)`", line.split(" | ")[0]))
    return found


def test_every_table_is_checked():
    assert set(documented()) == set(NAMES) | SEEN


@pytest.mark.parametrize("section", NAMES)
def test_the_page_names_every_field_in_order_and_no_other(section):
    assert documented()[section] == list(NAMES[section])


def sources_of_parts() -> str:
    folders = (ROOT / "sim" / "parts", ROOT / "sim" / "kv")
    return "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))


def test_the_page_names_the_counters_of_layerkv():
    seen = set()
    for policy in ("layerkv", "layerkv:decode=stream"):
        seen |= set(assemble(finished(policy)).counters.policy)
    names = documented()["counters of layerkv"]
    assert len(seen) > 5
    assert seen <= set(names)
    sources = sources_of_parts()
    assert [name for name in names if f'"{name}"' not in sources] == []


def test_the_page_names_the_counters_of_fastserve():
    names = documented()["counters of fastserve"]
    assert set(assemble(finished("fastserve")).counters.policy) <= set(names)
    sources = sources_of_parts()
    written = set(re.findall(r'counters\.policy\["(\w+)"\]', sources))
    others = {
        name
        for kind in ("layerkv", "pools", "tiers", "hcache and kvpr")
        for name in documented()[f"counters of {kind}"]
    }
    assert set(names) <= written <= {*names, *others}
    assert set(documented()["counters of tiers"]) <= written


def test_the_page_names_the_counters_of_ellm():
    seen = assemble(finished("ellm:least-uncached-ratio=0.2")).counters.policy
    assert sorted(seen) == sorted(documented()["counters of ellm"])


def test_the_page_names_the_counters_of_hcache_and_kvpr():
    names = documented()["counters of hcache and kvpr"]
    seen = set(assemble(finished("kvpr")).counters.policy) | set(assemble(finished("hcache")).counters.policy)
    assert names[1] in seen
    assert seen <= {*names, *documented()["counters of layerkv"]}


def test_the_page_names_the_counters_of_adaptive():
    seen = set(assemble(finished("adaptive:tpot-slo-ms=100")).counters.policy)
    assert {"parked_sequences", "returned_sequences"} <= seen <= set(documented()["counters of adaptive"])


def test_the_page_names_the_counters_of_pools():
    options = replace(CROWDED, prefill_replicas=1, decode_replicas=1, link_gbps=100.0)
    seen: dict[str, int] = {}
    for policy in ("distserve", "memserve", "splitwise:mixed-pool=true,max-pending-tokens=1"):
        seen |= assemble(finished(policy, options=options)).counters.policy
    names = set(documented()["counters of pools"])
    assert set(seen) <= names
    # Few runs need to take anything back, and no turn follows upon another here.
    assert names - set(seen) <= {"taken_back", "returned_blocks"}


def test_the_page_names_what_a_timeline_holds(tmp_path):
    write_timeline(tmp_path, finished("layerkv", Recording(timeline=True)))
    trace = json.loads(gzip.decompress((tmp_path / TIMELINE_FILE).read_bytes()))
    assert documented()["timeline.json.gz"] == list(trace)
    assert set(documented()["events"]) == {key for event in trace["traceEvents"] for key in event}
