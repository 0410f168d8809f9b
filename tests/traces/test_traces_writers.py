"""What is written is what is read back, and a failed write leaves nothing."""

import os
import subprocess
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.hash_ids import output_blocks
from traces.readers import open_trace
from traces.request import Image, Request, ToolCall
from traces.slos import SLOs
from traces.writers import write_trace

names = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=6)

milliseconds = st.none() | st.integers(1, 10**9).map(lambda ms: ms / 1e3)
tool_calls = st.lists(st.builds(ToolCall, st.integers(1, 9), st.floats(0, 1e6), st.integers(0, 9**9)), max_size=3)
gaps = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(-9, 2**64)), max_size=3)
own_slos = st.none() | st.builds(SLOs, milliseconds, milliseconds, milliseconds).filter(any)


@st.composite
def requests(draw):
    count = draw(st.integers(1, 12))
    times = sorted(draw(st.lists(st.floats(0, 1e9, allow_nan=False), min_size=count, max_size=count)))
    stream = []
    for i, time in enumerate(times):
        prompt, output = draw(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)))
        block = draw(st.sampled_from((0, max(1, prompt // 3))))
        hashes = tuple(draw(st.integers(0, 2**63)) for _ in range(-(-prompt // block))) if block else ()
        most = output_blocks(prompt, output, block) if hashes else 0
        more = draw(st.integers(most - 1, most)) if 0 < most < 100 else 0
        output_hashes = tuple(draw(st.integers(-5, 2**63)) for _ in range(more))
        priority = draw(st.just(0) | st.integers(-(2**63), 2**63))
        row = Request(i, time + 0.0, prompt, output, draw(names), hashes, block, output_hashes, priority)
        calls = {call.after_tokens: call for call in draw(tool_calls) if call.after_tokens < output and not more}
        row = row._replace(calls=tuple(calls[after] for after in sorted(calls)))
        row = row._replace(slos=draw(own_slos), acceptance_rate=draw(st.none() | st.floats(0, 1)))
        images, end = [], 0
        for gap, tokens, ident in draw(gaps):
            images.append(Image(end + gap, tokens, ident))
            end += gap + tokens
        row = row._replace(images=tuple(images) if end <= prompt else ())
        stream.append(row._replace(lora=draw(names).strip()))
    return stream


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(requests())
def test_our_csv_is_lossless(tmp_path, stream):
    path = tmp_path / "t.csv"
    assert write_trace(stream, path) == len(stream)
    assert list(open_trace(path)) == stream


def test_rows_widen_when_a_later_request_needs_it(tmp_path):
    plain = [Request(i, float(i), 5, 6) for i in range(10_000)]
    path = tmp_path / "t.csv"
    for late in (Request(10_000, 10_000.0, 20, 1, "late", (4, 5), 16), Request(10_000, 10_000.0, 20, 1, priority=-1)):
        write_trace([*plain, late], path)
        assert list(open_trace(path)) == [*plain, late]
        assert list(tmp_path.iterdir()) == [path]


def test_mooncakes_jsonl_reads_back(tmp_path):
    stream = [Request(0, 0.0, 600, 5, "", (1, 2), 512), Request(1, 1.5, 512, 6, "", (1,), 512)]
    path = tmp_path / "t.jsonl"
    write_trace(stream, path)
    assert path.read_text().splitlines()[1] == (
        '{"timestamp": 1500, "input_length": 512, "output_length": 6, "hash_ids": [1]}'
    )
    assert list(open_trace(path)) == stream
    more = [*stream, Request(2, 2.0, 600, 500, "", (1, 2), 512, (3,), 7), Request(3, 2.0, 5, 5, priority=-1)]
    more.append(Request(4, 2.0, 5, 5, slos=SLOs(ttft_s=0.5, tpot_s=0.0501)))
    more.append(Request(5, 2.0, 5, 5, acceptance_rate=0.7))
    more.append(Request(6, 2.0, 5, 5, calls=(ToolCall(1, 0.5, 0), ToolCall(4, 0.0, 3))))
    more.append(Request(7, 2.0, 50, 5, images=(Image(0, 40, 7), Image(40, 10, -8))))
    more.append(Request(8, 2.0, 5, 5, lora="sql_v2"))
    write_trace(more, path)
    assert list(open_trace(path)) == more


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_a_trace_of_nothing_is_refused(tmp_path, name):
    with pytest.raises(TraceError, match="no request is left"):
        write_trace([], tmp_path / name)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("old")

    def breaks():
        yield Request(0, 0.0, 1, 1)
        raise TraceError("bad row")

    with pytest.raises(TraceError, match="bad row"):
        write_trace(breaks(), path)
    with pytest.raises(TraceError, match="no request is left"):
        write_trace([], path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_places_and_names_are_told(tmp_path):
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace([Request(0, 0.0, 1, 1)], tmp_path / "none" / "t.csv")
    with pytest.raises(TraceError, match="line break"):
        write_trace([Request(0, 0.0, 1, 1, "a\nb")], tmp_path / "t.csv")


PLAIN_ROWS = "arrival_s,prompt_tokens,output_tokens\n0.0,5,6\n"


def test_a_symbolic_link_stays_and_its_file_is_replaced(tmp_path):
    target, link = tmp_path / "data" / "t.csv", tmp_path / "link.csv"
    target.parent.mkdir()
    link.symlink_to(target)
    for old in (None, "old"):  # a link to nothing yet, too
        if old:
            target.write_text(old)
        write_trace([Request(0, 0.0, 5, 6)], link)
        assert link.is_symlink() and target.read_text() == PLAIN_ROWS
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are of POSIX")
def test_a_pipe_is_written_through_and_stays(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    # Rows that widen late need text that can be taken back, which a pipe has not.
    stream = [*(Request(i, float(i), 5, 6) for i in range(5000)), Request(5000, 5000.0, 20, 1, "late")]
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert write_trace(stream, pipe) == 5001
    reader.join()
    assert pipe.is_fifo()
    (tmp_path / "t.csv").write_text(read[0])
    assert list(open_trace(tmp_path / "t.csv")) == stream


def test_a_dash_is_standard_output(tmp_path):
    command = [sys.executable, "-m", "kvtwin", "trace", "generate", "fixed", "--num-prompts", "2", "-o", "-"]
    sized = [*command, "--input-len", "5", "--output-len", "6"]
    done = subprocess.run(sized, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment())
    assert list(tmp_path.iterdir()) == []
    assert done.stderr == "wrote 2 requests\n"
    (tmp_path / "t.csv").write_text(done.stdout)
    assert [request[2:4] for request in open_trace(tmp_path / "t.csv")] == [(5, 6), (5, 6)]


def environment():
    """Ours, with this checkout first wherever the command runs."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of file sizes are of POSIX")
@pytest.mark.parametrize(("plain", "late"), [(100_000, ""), (4_500, "late")])  # the second: while rows widen
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, plain, late):
    """A limit of file sizes stands for the disk: the same error reaches the same calls."""
    code = (
        "import resource, signal, sys; from traces.request import Request; from traces.writers import write_trace\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        f"plain = (Request(i, float(i), 5, 6) for i in range({plain}))\n"
        f"stream = [*plain, Request({plain}, 1e5, 20, 1, {late!r})]\n"
        "write_trace(stream, sys.argv[1])"
    )
    path = tmp_path / "t.csv"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, env=environment())
    assert done.returncode and f"{path}: cannot be written (File too large)" in done.stderr
    assert list(tmp_path.iterdir()) == []
