"""Bad input to `kvtwin run`: one line on standard error that names the place, the value and the remedy; exit 2."""

import csv
import json
import re
import subprocess
import sys

import pytest

import kvtwin

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
GOOD = HEADER + "0.0,100,5\n0.5,50,3\n1.0,20,1\n"
LINEAR = {"form": "linear", "prefill": [0.01, 1e-4, 0.0], "decode": [0.02, 1e-3, 1e-4], "swap_s_per_block": 1e-3}
WORKLOAD = ["--workload", "fixed", "--num-prompts", "3", "--input-len", "10", "--output-len", "3"]
MACHINE = ["--model", "llama-2-7b", "--gpu", "l20"]


def attempt(capsys, arguments):
    """Exit status and standard error of one command; nothing may be printed to standard output."""
    try:
        status = kvtwin.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert printed.out == ""
    return status, printed.err


def refused(capsys, arguments, parts):
    status, error = attempt(capsys, arguments)
    assert status == 2
    assert error.startswith("kvtwin")
    assert error.count("\n") == 1 and error.endswith("\n"), error
    assert "Traceback" not in error
    assert [part for part in parts if part not in error] == [], error


def command(out, *words, policy="vllm-recompute"):
    return ["run", *MACHINE, "--policy", policy, "--out", out, "--quiet", *words]


# -- options ---------------------------------------------------------------------------------------------------------

OPTIONS = {
    "--num-prompts": [("0", "greater than 0"), ("2.5", "whole number"), (str(2**62), "give at most 1000000000")],
    "--replicas": [("1000000000", "give at most 100000")],
    "--seed": [("-1", "negative"), ("1e400", "whole number"), (str(2**64), "64 bits")],
    "--tp": [("3", "choose one of [1, 2, 4, 8"), ("64", "32 attention heads")],
    "--request-rate": [("0", "greater than 0"), ("nan", "not a number")],
    "--burstiness": [("inf", "1 is Poisson")],
    "--rate-scale": [("inf", "2 doubles the rate")],
    "--clip": [("1", "give 2 or more")],
    "--input-len": [(str(2**62), "input_len 4611686018427387904 is not between 1 and 1e+09")],
    "--output-len": [("-1", "greater than 0"), (str(2**62), "is not between 1 and 1e+09")],
    "--block-size": [("0", "greater than 0")],
    "--max-num-seqs": [("0", "greater than 0"), ("5000", "--max-num-batched-tokens: 4096 is less than")],
    "--max-num-batched-tokens": [("0", "greater than 0"), ("100", "--enable-chunked-prefill")],
    "--max-model-len": [("0", "greater than 0"), ("", "whole number")],
    "--num-gpu-blocks-override": [("0", "greater than 0")],
    "--num-cpu-blocks-override": [("-1", "negative")],
    "--swap-space": [("-1", "negative"), ("inf", "choose less"), ("1e9", "choose less")],
    "--gpu-memory-utilization": [("0", "(0, 1]"), ("1.5", "(0, 1]")],
    "--model": [("llama-2-7", "did you mean 'llama-2-7b'?"), ("gpt-9", "neither a built-in name")],
    "--gpu": [("l2", "did you mean 'l20'?"), ("quantum", "Known: ")],
    "--profile": [("l20-derive", "did you mean 'l20-derived'?"), ("h100-derived", "use a profile of l20")],
    "--workload": [("fixd", "did you mean 'fixed'?"), ("", "give one of fixed")],
    "--cost-form": [("foo", "choose from"), ("linear", "'l20-derived' of form 'roofline'")],
    "--trace-format": [("azure", "goes with --trace")],
    "--range-ratio": [
        ("0.5", "goes with --workload uniform or --workload sessions or --workload documents; leave it out")
    ],
    "--zero-tokens": [("drop", "goes with --trace"), ("two", "choose from")],
    "--goodput": [
        *((word, "NAME:MILLISECONDS with NAME one of ttft, tpot, e2el") for word in ("ttft", "itl:3", "ttft:nan")),
        *((word, "MILLISECONDS above 0, 1e+12 at most") for word in ("ttft:1e300", "ttft:0")),
    ],
    "--layerkv-tpot-slo-ms": [("5", "an option of layerkv, which --policy does not name")],
}


@pytest.mark.parametrize("flag", OPTIONS)
def test_an_impossible_value_is_refused(tmp_path, capsys, flag):
    for value, part in OPTIONS[flag]:
        refused(capsys, command(tmp_path / "out", *WORKLOAD, f"{flag}={value}"), [part])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["kvtwin: ", "COMMAND", "--help"]),
        (["rum"], ["'rum'", "run", "compare"]),
        (["compare"], ["--policy is missing", "vllm-recompute, vllm-swap, layerkv"]),
        (["run", "--policy"], ["--policy: expected at least one argument"]),
        (
            ["run", "--policy", "layerkv", "--workload", "fixed", "--out", ""],
            ["--out: '' names no folder", ". is this one"],
        ),
        (["run", "--polcy", "layerkv"], ["kvtwin run: ", "--polcy", "did you mean --policy?", "kvtwin run --help"]),
        (["run", "--num_prompts=3"], ["--num_prompts=3", "did you mean --num-prompts?"]),
        (["run", "stray\nword"], ["stray\\nword"]),
        (["run", "--policy", "layerkv", *WORKLOAD], ["--out DIR is missing"]),
        (["run", "--policy", "layerkv", "--out", "o"], ["--trace FILE and --workload NAME: neither is given"]),
        (
            ["run", "--policy", "layerkv", "vllm-swap", "--out", "o", *WORKLOAD],
            ["one --policy", "kvtwin compare"],
        ),
        (
            ["compare", "--policy", "layerkv", "--policy", "layerkv", "vllm-swap", "--out", "o", *WORKLOAD],
            ["names one twice"],
        ),
        (["run", "--scenario", "no\nsuch.toml"], ["--scenario: cannot read no\\nsuch.toml", "No such file"]),
    ],
)
def test_an_incomplete_or_unknown_command_is_refused(capsys, words, parts):
    refused(capsys, words, parts)


def test_both_sources_of_traffic_are_refused(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text(GOOD)
    refused(capsys, command(tmp_path / "out", *WORKLOAD, "--trace", path), ["--trace", "--workload", "both are given"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--input-len", "5"], "--input-len: 5 goes with --workload"),
        (["--burstiness", "2"], "--burstiness: shapes the arrivals of --request-rate"),
        (["--trace-format", "azur"], "did you mean 'azure'?"),
        (["--time-unit", "fortnight"], "give one of s, ms, us, ns"),
        (["--tokenizer", "bytes:x"], "write for example bytes:4"),
        (["--tokenizer", "/no/such"], "tokenizer '/no/such': no such file"),
    ],
)
def test_an_option_that_a_trace_cannot_have_is_refused(tmp_path, capsys, words, part):
    path = tmp_path / "t.csv"
    path.write_text(GOOD)
    refused(capsys, command(tmp_path / "out", "--trace", path, *words), [part])


def test_a_model_that_is_too_large_for_the_gpu_is_refused_with_its_size(tmp_path, capsys):
    words = ["--model", "llama-2-70b", "--gpu", "l20", "--policy", "vllm-swap", "--out", tmp_path / "out", *WORKLOAD]
    refused(capsys, ["run", *words], ["llama-2-70b does not fit on l20", "GB of weights", "raise --tp"])


def test_where_a_larger_share_of_the_memory_is_enough_that_is_the_remedy(tmp_path, capsys):
    def with_share(share):
        words = ["--model", "llama-2-7b", "--gpu", "a100-80g", "--gpu-memory-utilization", share]
        return command(tmp_path / "out", *WORKLOAD, *words)

    _, error = attempt(capsys, with_share("0.1"))
    assert "GPU with more memory" not in error
    share = re.search(r"raise --gpu-memory-utilization to (0\.\d\d) or more", error)[1]
    assert attempt(capsys, with_share(share)) == (0, "")
    refused(capsys, with_share(f"{float(share) - 0.01:.2f}"), [f"raise --gpu-memory-utilization to {share} or more"])


# -- files -----------------------------------------------------------------------------------------------------------

BAD_TRACES = [
    # text of the file, line, what else the message must hold: field, value, remedy
    ("a,b,c\n1,2,3\n", 1, ["header", "a,b,c", "arrival_s,prompt_tokens,output_tokens"]),
    ("arrival,prompt_tokens,output_tokens\n1,2,3\n", 1, ["rename column 'arrival' to 'arrival_s'"]),
    (HEADER + "5.0,10,2\n1.0,10,2\n", 3, ["arrival_s", "'1.0'", "earlier", "sort"]),
    ("", None, ["is empty"]),
]


@pytest.mark.parametrize(("text", "line", "parts"), BAD_TRACES)
def test_a_bad_trace_is_refused_by_file_line_field_and_value(tmp_path, capsys, text, line, parts):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    where = f"{path}, line {line}: " if line else f"{path}"
    refused(capsys, command(tmp_path / "out", "--trace", path), [where, *parts])


NAMED = HEADER.replace("\n", ",hash_ids\n") + "0.0,33,5,1 2 3\n"
MOONCAKE = '{"timestamp": 0, "input_length": 33, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
MENDED = [
    # A trace, the remedy that its error names, what else the error says, and words that follow the remedy.
    (NAMED, "--hash-block-tokens", "no block size", ["16"]),
    (MOONCAKE, "--hash-block-tokens", "3 ids where 33 tokens make 1 blocks of 512", ["16"]),
    (HEADER + "0.0,0,2\n1.0,33,5\n", "--zero-tokens", "'0' is no request", ["drop"]),
    ('{"prompt": "four", "output_tokens": 9}\n', "--tokenizer", "not given", ["bytes:4"]),
    ('{"prompt": "four", "output_tokens": 9}\n', "--default-prompt-tokens", "not given", ["5"]),
    ('{"prompt": "four"}\n', "--default-output-tokens", "not given", ["5", "--tokenizer", "bytes:4"]),
]


@pytest.mark.parametrize(("text", "flag", "part", "words"), MENDED)
def test_the_remedy_that_an_error_names_is_one(tmp_path, capsys, text, flag, part, words):
    path = tmp_path / "t"
    path.write_text(text)
    arguments = command(tmp_path / "out", "--trace", path)
    refused(capsys, arguments, [f"{path}, line ", part, f"`{flag}"])
    status, error = attempt(capsys, [*arguments, flag, *words])
    assert status == 0
    dropped = f"kvtwin: vllm-recompute: warning: 1 rows of {path} left out (--zero-tokens drop)\n"
    assert error == (dropped if words == ["drop"] else "")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["completed"] == 1
    value = result["scenario"][flag[2:].replace("-", "_")]
    assert str(value) == words[0]


@pytest.mark.parametrize("words", [[], ["--num-prompts", 1]])
def test_what_a_run_leaves_out_of_a_trace_is_told_once_though_it_ends_early(tmp_path, capsys, words):
    """A row without output tokens, and a column whose name is like none that is read."""
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,user\n0,8,0,a\n0,8,2,b\n1,8,2,c\n")
    status, error = attempt(capsys, command(tmp_path / "out", "--trace", path, "--zero-tokens", "drop", *words))
    said = [line.partition(" warning: ")[2] for line in error.splitlines()]
    assert (status, said) == (
        0, [f"1 rows of {path} left out (--zero-tokens drop)", f"{path}: nothing reads column user"]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "name", "part"),
    [
        ("--trace", "missing.csv", "no such file; check the path"),
        ("--trace", ".", "is a directory; name one trace file"),
        ("--profile", "missing.json", "neither a built-in name nor an existing path"),
        ("--model", ".", "config.json: cannot be read"),
        ("--scenario", "missing.toml", "No such file"),
        ("--out", "file/below", "cannot create folder"),
    ],
)
def test_a_file_that_is_missing_or_a_folder_is_refused(tmp_path, capsys, flag, name, part):
    (tmp_path / "file").write_text("in the way")
    words = WORKLOAD if flag != "--trace" else []
    path = tmp_path / name
    refused(capsys, command(tmp_path / "out", *words, flag, path), [str(path), part])
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_result_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "out" / "result.json").mkdir(parents=True)
    refused(capsys, command(tmp_path / "out", *WORKLOAD), ["result.json"])


@pytest.mark.parametrize("words", [["--model", "m\udcff"], ["--gpu=\udcff"], ["--out", "\udcff"]])
def test_words_that_results_could_not_hold_are_refused(tmp_path, capsys, words):
    refused(capsys, command(tmp_path / "out", *WORKLOAD, *words), ["\\udcff' is not UTF-8 text", "rename it"])


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000])
def test_what_python_cannot_read_of_toml_is_refused(tmp_path, capsys, value):
    path = tmp_path / "s.toml"
    path.write_text(f"seed = {value}")
    refused(capsys, command(tmp_path / "out", "--scenario", path), [f"{path}: not a TOML file: "])


@pytest.mark.parametrize("name", ["p.json", "s.toml"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, capsys, name):
    texts = {"p.json": json.dumps(LINEAR), "s.toml": 'workload = "fixed"\ninput_len = 10\noutput_len = 3\n'}
    (tmp_path / name).write_text("\ufeff" + texts[name], encoding="utf-8")
    words = ["--profile", *WORKLOAD] if name == "p.json" else ["--scenario", "--num-prompts", "3"]
    words.insert(1, tmp_path / name)
    assert attempt(capsys, command(tmp_path / "out", *words)) == (0, "")


@pytest.mark.parametrize("flag", ["--profile", "--scenario", "--model"])
def test_a_device_without_end_is_refused(tmp_path, capsys, monkeypatch, flag):
    monkeypatch.setattr("sim.files.MOST_TEXT_BYTES", 1 << 20)
    refused(capsys, command(tmp_path / "out", *WORKLOAD, flag, "/dev/zero"), ["/dev/zero: more than 1 MiB", "a file"])


# -- half-way --------------------------------------------------------------------------------------------------------


def rows_of(folder):
    if (folder / "requests.parquet").exists():
        return pytest.importorskip("pyarrow.parquet").read_table(folder / "requests.parquet").to_pylist()
    with (folder / "requests.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["run", "compare"])
def test_a_bad_row_half_way_keeps_what_finished_before(tmp_path, capsys, name):
    # Readers check a block of rows at a time, so the bad one must stand far enough behind.
    good = "".join(f"{i * 0.5},20,2\n" for i in range(9_000))
    path = tmp_path / "long.csv"
    path.write_text(HEADER + good + "10000.0,-7,2\n" + "10001.0,5,2\n")
    out = tmp_path / "out"
    refused(
        capsys,
        [name, *command(out, "--trace", path)[1:]],
        [f"{path}, line 9002: ", "prompt_tokens", "'-7'", f"what finished before is in {out}"],
    )
    folder = out if name == "run" else out / "vllm-recompute"
    result = json.loads((folder / "result.json").read_text())
    assert result["complete"] is False
    assert "line 9002" in result["error"]
    assert 0 < result["completed"] == len(rows_of(folder)) == len(result["ttfts"]) <= 9_000


@pytest.mark.parametrize("row", [1, 9_000])
def test_a_bad_row_replaces_no_earlier_result(tmp_path, capsys, row):
    """What had finished before it is beside, until a run that comes to its end."""
    out = tmp_path / "out"
    assert attempt(capsys, command(out, *WORKLOAD, "--timeline")) == (0, "")
    before = {path: path.read_bytes() for path in out.iterdir()}
    path = tmp_path / "bad.csv"
    path.write_text(HEADER + "".join(f"{i * 0.5},20,2\n" for i in range(row - 1)) + "10000.0,-5,2\n")
    refused(capsys, command(out, "--trace", path), [f"line {row + 1}"])
    if row > 1:
        assert json.loads((out / "unfinished" / "result.json").read_text())["completed"] > 0
    assert {path: path.read_bytes() for path in out.iterdir() if path in before} == before
    assert attempt(capsys, command(out, *WORKLOAD)) == (0, "")
    assert not (out / "unfinished").exists() and not (out / "timeline.json.gz").exists()


def test_swapping_without_host_memory_recomputes_counts_and_warns_once(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "".join(f"0.0,{60 + i},40\n" for i in range(8)))
    words = ["--trace", path, "--num-gpu-blocks-override", "24", "--swap-space", "0"]
    status, error = attempt(capsys, command(tmp_path / "swap", *words, policy="vllm-swap"))
    result = json.loads((tmp_path / "swap" / "result.json").read_text())
    counters = result["counters"]
    assert status == 0
    assert result["completed"] == 8
    assert counters["swap_space_exhausted"] == result["num_preemptions"] > 1
    assert counters["swap_out_blocks"] == counters["swap_in_blocks"] == 0
    assert error.count("\n") == 1
    assert f"host KV blocks ran out {counters['swap_space_exhausted']} times" in error and "--swap-space" in error
    # Without host memory it is vLLM that recomputes.
    assert attempt(capsys, command(tmp_path / "recompute", *words)) == (0, "")
    other = json.loads((tmp_path / "recompute" / "result.json").read_text())
    assert other["latencies"] == result["latencies"]


@pytest.mark.parametrize(
    ("policy", "prompt", "reason"),
    [
        ("vllm-swap", 500, "prompt needs more KV blocks than the GPU has"),
        ("layerkv", 5000, "prompt longer than max_model_len"),
    ],
)
def test_a_prompt_that_never_fits_is_ignored_and_the_others_are_served(tmp_path, capsys, policy, prompt, reason):
    path = tmp_path / "t.csv"
    path.write_text(HEADER + f"0.0,20,3\n0.1,{prompt},3\n0.2,20,3\n")
    words = ["--trace", path, "--num-gpu-blocks-override", "20"]
    status, error = attempt(capsys, command(tmp_path / "out", *words, policy=policy))
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert status == 0
    assert "warning: 1 request ignored: " + reason in error and error.count("\n") == 1
    assert ("(--max-model-len 4096, --max-num-batched-tokens 4096)" in error) is (prompt == 5000)
    assert (result["completed"], result["ignored"]) == (2, 1)
    assert [bool(text) for text in result["errors"]] == [False, True, False]
    assert [name.startswith(reason) for name in result["counters"]["ignored"]] == [True]


def test_the_process_itself_exits_with_2_and_one_line(tmp_path):
    words = map(str, command(tmp_path / "out", "--trace", tmp_path / "missing.csv"))
    done = subprocess.run([sys.executable, "-m", "kvtwin", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvtwin: ") and done.stderr.count("\n") == 1
