"""`kvtwin policies` tells what there is and what mixes; what other distributions bring is found and named."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

import sim.systems
from kvtwin import main
from kvtwin.mixes import single_replacements, table
from kvtwin.testing import limits, requests, simulate
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.parts import catalogue
from sim.systems import POLICIES
from sim.systems.vllm055 import VllmRecompute

PAGE = (Path(__file__).parents[1] / "docs" / "mixes.md").read_text(encoding="utf-8")

MINE = '''
from dataclasses import dataclass
from typing import ClassVar

from sim.parts.options import option
from sim.parts.order.fcfs import Fcfs
from sim.systems.vllm055 import VllmRecompute


class Last(Fcfs):
    """Last come, first served."""

    name: ClassVar[str] = "last"
    sticky: ClassVar[bool] = False

    def add(self, seq):
        self._queue.appendleft(seq)


@dataclass(frozen=True)
class Mine(VllmRecompute):
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "last come, first served"
    composition: ClassVar[dict[str, str]] = {**VllmRecompute.composition, "order": "last"}
    least: int = option(3, "an option of mine")
'''
ENTRIES = "[kvtwin.systems]\nmine = mine:Mine\n[kvtwin.parts]\norder.last = mine:Last\n"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Puts a distribution where Python looks for some, as an installer would; all is forgotten afterwards."""
    tables = [sim.systems._PLACES, catalogue.ORIGINS, *catalogue.PLACES.values()]
    before = [dict(found) for found in tables]

    def installed(entries: str = ENTRIES, code: str = MINE, name: str = "my-policy") -> None:
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(entries, encoding="utf-8")
        (tmp_path / "mine.py").write_text(code, encoding="utf-8")

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        for read in (sim.systems.read_systems, catalogue.read_parts):
            read.cache_clear()
        yield installed
    for found, was in zip(tables, before, strict=True):
        found.clear()
        found.update(was)
    for read in (sim.systems.read_systems, catalogue.read_parts):
        read.cache_clear()
    sys.modules.pop("mine", None)


def test_the_table_of_the_docs_is_what_assembles():
    assert [line for line in PAGE.splitlines() if line.startswith("|")] == table(list(POLICIES))


def test_every_refusal_gives_a_reason_and_names_a_part_or_option():
    for system in POLICIES:
        for mix in single_replacements(system):
            assert not mix.refusal or re.search(r"\w=\w|--\w", mix.refusal), mix


def test_a_part_that_is_refused_is_refused_with_what_would_do_instead(capsys: pytest.CaptureFixture[str]):
    assert main(["policies", "sarathi", "--mixes"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "eviction=park asks for classes and laxities: it goes with order=triage, not order=fcfs" in told
    assert main(["policies", "sarathi:order=priority", "--mixes"]) == 2
    assert "--mixes: replaces single parts of a system" in capsys.readouterr().err


def test_systems_are_listed_and_one_is_told_with_its_options(capsys: pytest.CaptureFixture[str]):
    assert main(["policies"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(POLICIES)
    assert main(["policies", "layerkv"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"memory +layers\n", told)
    assert "--layerkv-threshold" in told


def test_what_is_installed_is_known_by_name(install: Install):
    install()
    assert "mine" not in POLICIES
    _, policy = parse_policy("mine:least=5", {})
    ended = simulate(policy, requests((0.0, 16, 50), (0.1, 16, 5), (0.2, 16, 5)), limits(seqs=1)).by_id()
    assert ended[2].finish_s < ended[1].first_token_s


def test_a_system_whose_part_is_not_installed_is_refused_in_a_line():
    class Unregistered(VllmRecompute):
        composition: ClassVar[dict[str, str]] = {**VllmRecompute.composition, "order": "last"}

    with pytest.raises(UserError, match=r"^order=last: no such part; "):
        simulate(Unregistered(), requests((0.0, 16, 5)), limits())


def test_its_parts_mix_with_other_systems(install: Install):
    install()
    assert parse_policy("sarathi:order=last", {})[1].names["order"] == "last"


def test_what_derives_from_vllm_v1_keeps_its_own_order_and_the_prices_of_unified_batches(install: Install):
    code = MINE.replace("sim.systems.vllm055 import VllmRecompute", "sim.systems.vllm_v1 import VllmV1")
    code = code.replace("VllmRecompute", "VllmV1").replace('"order": "last"', '"order": "last", "batching": "batches"')
    code += """
from sim.parts.batching.unified import Unified


class Batches(Unified):
    name = "batches"
"""
    install(ENTRIES + "batching.batches = mine:Batches\n", code)
    mine, plain = parse_policy("mine", {})[1], parse_policy("vllm-v1", {})[1]
    assert mine.names["order"] == "last"
    for ahead in (False, True):
        assert (
            mine.with_async_scheduling(ahead).own_engine_profile
            == plain.with_async_scheduling(ahead).own_engine_profile
        )
    assert parse_policy("mine:scheduling-policy=priority", {})[1].names["order"] == "priority"


def test_it_is_listed_and_its_options_are_flags(install: Install, capsys: pytest.CaptureFixture[str]):
    install()
    assert main(["policies"]) == 0
    assert "last come, first served" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["run", "--help", "all"])
    assert "--mine-least" in capsys.readouterr().out


def test_a_flag_of_it_is_taken_though_nothing_else_has_asked_for_it(install: Install, tmp_path: Path):
    install()
    words = "run --policy mine --mine-least 4 --workload uniform --num-prompts 3 --request-rate 1 --quiet"
    assert main([*words.split(), "--model", "llama-2-7b", "--gpu", "l20", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize(
    ("entries", "code", "words"),
    [
        (ENTRIES, "import nowhere", ["my-policy", "'mine'", "mine:Mine", "No module named 'nowhere'"]),
        (ENTRIES, "", ["my-policy", "mine:Mine", "Mine"]),
        (ENTRIES.replace("mine =", "other ="), MINE, ["my-policy", "'mine', not 'other'"]),
        ("[kvtwin.systems]\nsarathi = mine:Mine\n", MINE, ["my-policy", "'sarathi' is sim.systems.sarathi:Sarathi"]),
        ("[kvtwin.parts]\nlast = mine:Last\n", MINE, ["my-policy", "'last'", "KIND.NAME"]),
        ("[kvtwin.parts]\nhead.last = mine:Last\n", MINE, ["my-policy", "head=last", "no such kind"]),
    ],
)
def test_what_is_broken_is_named_with_its_distribution(entries: str, code: str, words: list[str], install: Install):
    install(entries, code)
    with pytest.raises(UserError) as error:
        sim.systems.read_systems()
        catalogue.read_parts()
        list(POLICIES.values())
    assert all(word in str(error.value) for word in words)


def test_a_broken_distribution_is_told_only_where_it_is_asked_for(install: Install):
    install(ENTRIES, "import nowhere")
    assert parse_policy("sarathi:order=priority", {})[1].names["order"] == "priority"


@pytest.mark.parametrize("entries", [ENTRIES, "[kvtwin.systems]\nsarathi = mine:Mine\n"])
def test_the_help_says_what_is_broken_and_has_all_else(entries: str, install: Install, capsys):
    install(entries, "import nowhere")
    with pytest.raises(SystemExit) as end:
        main(["run", "--help", "all"])
    told = capsys.readouterr().out
    assert end.value.code == 0 and "--layerkv-threshold" in told
    assert "my-policy" in told.partition("not to be had")[2]


def test_of_two_distributions_with_a_name_the_second_is_named(install: Install):
    install()
    install("[kvtwin.systems]\nmine = mine:Other\n", MINE, "their-policy")
    with pytest.raises(UserError, match=r"(their|my)-policy: .*policy 'mine' is mine:"):
        sim.systems.read_systems()
