"""docs/results.md says of every file and field that a run leaves what they say of themselves, and names no other."""

import gzip
import json
import re
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from small_results import CROWDED, finished

from sim.results.parts import Counts
from sim.results.result import RESULT_FILE, SERIES_FILE, assemble
from sim.results.timeline import TIMELINE_FILE, write_timeline
from sim.run_files import TABLE_FILES
from sim.runs import Recording

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


@pytest.mark.parametrize(("heading", "where"), SOURCES)
def test_the_page_names_every_field_in_order_and_no_other(heading, where):
    module, name = where.split(":")
    described = getattr(import_module(module), name)
    if is_dataclass(described):
        names = [f.name for f in fields(described)]
    else:
        names = list(getattr(described, "__struct_encode_fields__", described))
    # The policy's own counters stand among the others.
    assert documented()[heading] == [field for field in names if described is not Counts or field != "policy"]


def test_the_page_names_every_file():
    assert documented()["Files"] == FILES


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
