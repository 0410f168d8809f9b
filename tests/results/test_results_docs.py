"""docs/results.md says of every file and field that a run leaves what they say of themselves, and names no other."""

import gzip
import json
import re
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from small_results import CROWDED, finished

from sim.results.result import RESULT_FILE, SERIES_FILE, assemble
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
