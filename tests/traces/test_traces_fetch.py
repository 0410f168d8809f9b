"""Fetching against a server on this machine: whole, cut off and resumed, wrong, without ranges, missing."""

import argparse
import hashlib
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from traces import catalogue
from traces.catalogue import entries, entry, fetch
from traces.cli import add_trace
from traces.errors import TraceError

DATA = bytes(range(256)) * 1500
SHA256 = hashlib.sha256(DATA).hexdigest()
NAME = "azure-conv-2023"


class Handler(BaseHTTPRequestHandler):
    """Serves DATA; the server's attributes say how it misbehaves."""

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.ranges.append(asked)
        if self.path != "/trace.csv":
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.knows_ranges else 0
        if start >= len(DATA):
            self.send_error(416)
            return
        if server.hangs_up:
            return
        start = 0 if server.goes_back else start
        self.send_response(206 if asked and server.knows_ranges else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(DATA) - 1}/{len(DATA)}")
        self.send_header("Content-Length", str(len(DATA) - start) if server.knows_length else "long")
        self.end_headers()
        end = len(DATA) if server.cut_at is None else server.cut_at
        self.wfile.write(DATA[start:end])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.ranges, server.knows_ranges, server.knows_length, server.cut_at = [], True, True, None
    server.goes_back = server.hangs_up = False
    server.url = f"http://127.0.0.1:{server.server_port}/trace.csv"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def get(server, out, **options):
    return fetch(NAME, out, **{"url": server.url, "sha256": SHA256, **options})


def test_a_whole_file_is_verified_and_moved_into_place(server, tmp_path):
    seen = []
    path = get(server, tmp_path / "t.csv", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [path]
    assert seen[-1] == (len(DATA), len(DATA))


def test_a_device_or_a_pipe_is_no_place_for_a_trace(server, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=r"pipe: is no file, .* name a file"):
        get(server, tmp_path / "pipe")
    assert server.ranges == []


@pytest.mark.parametrize("url", ["http://[", "http://a b/", "http:///t.csv"])
def test_a_url_of_no_host_is_told(tmp_path, url):
    with pytest.raises(TraceError, match="check the connection"):
        fetch(NAME, tmp_path / "t.csv", url=url, sha256=SHA256)


def test_a_cut_off_download_is_resumed(server, tmp_path):
    server.cut_at = 100_000
    with pytest.raises(TraceError, match=r"cut off after 100000 of 384000 bytes|IncompleteRead"):
        get(server, tmp_path / "t.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv.part"]
    server.cut_at, seen = None, []
    path = get(server, tmp_path / "t.csv", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == DATA and seen[-1] == (len(DATA), len(DATA))
    assert server.ranges == [None, "bytes=100000-"]
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_a_server_that_ignores_ranges_sends_all_anew(server, tmp_path):
    server.knows_ranges = False
    (tmp_path / "t.csv.part").write_bytes(DATA[:5000])
    assert get(server, tmp_path / "t.csv").read_bytes() == DATA
    assert server.ranges == ["bytes=5000-"]


def test_a_server_that_hangs_up_is_told(server, tmp_path):
    server.hangs_up = True
    with pytest.raises(TraceError) as caught:
        get(server, tmp_path / "t.csv")
    reason = "Remote end closed connection without response"
    remedy = "check the connection and run the command again to resume"
    assert str(caught.value) == f"{server.url}: {reason}; {remedy}"


def test_the_command_says_where_it_is_and_whose(server, tmp_path, capsys):
    """And shows, on a terminal, how far it is."""
    parser = argparse.ArgumentParser()
    add_trace(parser)
    out = tmp_path / "t.csv"
    args = parser.parse_args(["fetch", NAME, "-o", str(out), "--url", server.url, "--sha256", SHA256])
    assert args.run(args) == 0
    item = entry(NAME)
    assert capsys.readouterr().out == f"{out}: verified. Licence: {item.licence}. Please cite: {item.citation}\n"


def test_a_wrong_checksum_leaves_no_file_and_says_where_the_bytes_are(server, tmp_path):
    with pytest.raises(TraceError) as caught:
        get(server, tmp_path / "t.csv", sha256="0" * 64)
    assert SHA256 in str(caught.value)
    assert "t.csv.wrong" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv.wrong"]
    assert get(server, tmp_path / "t.csv").read_bytes() == DATA  # the next call starts anew


def test_a_part_of_another_file_is_found_out(server, tmp_path):
    (tmp_path / "t.csv.part").write_bytes(b"x" * 5000)
    with pytest.raises(TraceError, match="SHA-256"):
        get(server, tmp_path / "t.csv")
    (tmp_path / "t.csv.part").write_bytes(b"x" * (len(DATA) + 1))
    with pytest.raises(TraceError, match="SHA-256"):
        get(server, tmp_path / "t.csv")
    assert not (tmp_path / "t.csv").exists()


def test_what_is_there_and_right_is_not_fetched_again(server, tmp_path):
    get(server, tmp_path / "t.csv")
    get(server, tmp_path / "t.csv")
    assert server.ranges == [None]
    (tmp_path / "t.csv").rename(tmp_path / "t.csv.part")  # killed between the last byte and the renaming
    assert get(server, tmp_path / "t.csv").read_bytes() == DATA
    assert server.ranges == [None]


def test_missing_pages_dead_servers_and_odd_urls(server, tmp_path):
    with pytest.raises(TraceError, match="404"):
        get(server, tmp_path / "t.csv", url=server.url + "x")
    with pytest.raises(TraceError, match=r"^http://127\.0\.0\.1:9/trace\.csv: \[Errno .*\] .*; check the connection"):
        get(server, tmp_path / "t.csv", url="http://127.0.0.1:9/trace.csv")
    with pytest.raises(TraceError, match="not of http"):
        get(server, tmp_path / "t.csv", url="file:///etc/hostname")
    with pytest.raises(TraceError, match="not a SHA-256"):
        get(server, tmp_path / "t.csv", sha256="abc")
    with pytest.raises(TraceError, match=r"cannot be written \(No such file or directory\); check the folder"):
        get(server, tmp_path / "none" / "t.csv")


def test_what_cannot_be_verified_is_refused(server, tmp_path):
    unknown = next(item for item in entries() if item.sha256 is None)
    for url, named in ((server.url, server.url), (None, unknown.url)):
        with pytest.raises(TraceError, match=rf"download {re.escape(named)} yourself, or give --sha256 HEX"):
            fetch(unknown.name, tmp_path, url=url)
    assert server.ranges == []
    assert fetch(unknown.name, tmp_path / "t", url=server.url, sha256=SHA256.upper()).read_bytes() == DATA


def test_a_trace_that_is_not_in_the_catalogue_is_refused_with_the_nearest():
    for name, hint in (("azure-conv-20233", r"did you mean 'azure-conv-2023'\?"), ("zz", "see `kvtwin trace list`")):
        with pytest.raises(TraceError, match=f"trace '{name}' is not in the catalogue; {hint}"):
            entry(name)


def test_the_catalogue_is_whole():
    items = entries()
    assert len({item.name for item in items}) == len(items)
    for item in items:
        assert item.url.startswith("https://")
        assert item.licence
        assert item.citation
        assert item.sha256 is None or len(item.sha256) == 64
    assert catalogue.CATALOGUE.name == "catalogue.json"


def test_known_checksums_are_those_of_the_files(request):
    shared = request.path.parents[3] / "shared" / "traces"
    files = {"azure-conv-2023": "azure2023_conv.csv", "mooncake-synthetic": "mooncake_synthetic_trace.jsonl"}
    if not shared.exists():
        pytest.skip("needs the traces in ../shared (not shipped)")
    for name, file in files.items():
        assert hashlib.sha256((shared / file).read_bytes()).hexdigest() == entry(name).sha256
        assert (shared / file).stat().st_size == entry(name).bytes
