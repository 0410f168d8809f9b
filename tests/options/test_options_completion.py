"""`kvtwin completion`: the script completes in a real shell what the parsers have."""

import shutil
import subprocess
import sys

import pytest

from kvtwin import main


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_names_and_options(tmp_path, capsys):
    """Commands of commands, names that ship, and options that a parser adds late."""
    pytest.importorskip("shtab", reason="the extra completion is not installed")
    assert main(["completion", "bash"]) == 0
    ask = """
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
    function=$(complete -p kvtwin | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $function kvtwin "${COMP_WORDS[COMP_CWORD]}"
    echo "${COMPREPLY[*]}"
    """
    script = tmp_path / "ask"
    script.write_text(capsys.readouterr().out + ask)
    for words, found in {
        "profile de": "derive",
        "plan --gpu h2": "h200",
        "run --model mixt": "mixtral-8x7b-v0.1",
        "compare --layerkv-thr": "--layerkv-threshold",
    }.items():
        answer = subprocess.run(
            ["bash", script, "kvtwin", *words.split()], capture_output=True, text=True, check=True
        ).stdout
        assert answer.split() == [found]


def test_without_the_library_it_says_what_to_install(monkeypatch, capsys):
    """An extra that is not there is no traceback."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "zsh"]) == 2
    assert "pip install 'kvtwin[completion]'" in capsys.readouterr().err
