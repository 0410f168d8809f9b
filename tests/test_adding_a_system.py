"""The code of docs/adding-a-system.md is written out, imported and run, and the page's figures are what it gives."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import sim.systems
from sim.options.policies import parse_policy
from sim.parts.catalogue import PLACES
from sim.results.result import read_result

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding-a-system.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.DOTALL)
"""File and code, in the page's order; blocks of one file follow each other in it."""
TESTS = [
    name for file, code in BLOCKS if file.startswith("test_") for name in re.findall(r"^def (test_\w+)", code, re.M)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files."""
    folder = tmp_path_factory.mktemp("adding")
    for file in dict.fromkeys(file for file, _ in BLOCKS):
        parts = (code for other, code in BLOCKS if other == file)
        (folder / f"{file}.py").write_text("\n\n".join(parts), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ranking(folder: Path) -> Iterator[ModuleType]:
    """The page's module, imported; what it registers is forgotten afterwards."""
    places, orders = dict(sim.systems._PLACES), dict(PLACES["order"])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield import_module("ranking")
    for table, before in ((sim.systems._PLACES, places), (PLACES["order"], orders)):
        table.clear()
        table.update(before)
    for file, _ in BLOCKS:
        sys.modules.pop(file, None)


def test_every_python_block_of_the_page_is_run() -> None:
    assert len(BLOCKS) == PAGE.count("```python")
    assert list(dict.fromkeys(file for file, _ in BLOCKS)) == [
        "ranking", "test_ranking", "rate_limit", "test_rate_limit", "kvtwin_ranking",
    ]  # fmt: skip
    assert len(TESTS) == len(set(TESTS)) == 10


def test_the_part_is_as_long_as_the_page_says() -> None:
    code = BLOCKS[0][1]
    body = code[code.index("class ShortestOutput") :]
    (said,) = re.findall(r"only that part is written: (\d+) lines", PAGE)
    assert len([line for line in body.splitlines() if line.strip()]) == int(said)


def test_the_tests_of_the_page_pass(folder: Path) -> None:
    # One thread: small decoders gain nothing from more.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # Of what torch is needed for, nothing else may be left out.
    passed, skipped = (sum(map(int, re.findall(rf"(\d+) {word}", done.stdout))) for word in ("passed", "skipped"))
    assert (passed + skipped, skipped <= 1) == (9 + 5, True)


@pytest.mark.parametrize(
    "text", ["vllm-ltr:patience-s=10", "vllm-ltr:batching=sarathi", "sarathi:order=shortest-output,patience-s=10"]
)
def test_options_and_mixes_of_the_page_are_understood(ranking: ModuleType, text: str) -> None:
    assert text in PAGE
    assert parse_policy(text, {})[1].names["order"] == "shortest-output"


def test_the_command_line_knows_it_and_the_table_is_its_answer(folder: Path, tmp_path: Path) -> None:
    (command,) = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    python, *words = shlex.split(command.replace("\\\n", ""))
    assert python == "python"
    assert words[-2:] == ["--out", "out/"]
    words = [sys.executable, str(folder / words[0]), *words[1:-1], str(tmp_path), "--vllm-ltr-accuracy", "1", "--quiet"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| `(vllm-\S+)` \| (\S+) s \| (\S+) s \| (\S+) ms \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 3
    for label, *said in rows:
        result = read_result(tmp_path / label.replace(":", "_") / "result.json")
        found = (result.mean_ttft_ms, result.p99_ttft_ms, result.mean_tpot_ms)
        assert None not in found
        assert [f"{found[0] / 1e3:.2f}", f"{found[1] / 1e3:.2f}", f"{found[2]:.1f}"] == said
    assert result.scenario.policy_parts["batching"] == "sarathi"


def test_the_files_that_the_page_names_exist() -> None:
    named = [name for name in re.findall(r"`((?:sim|tests|docs)/[\w/.-]+)`", PAGE) if "NAME" not in name]
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []
