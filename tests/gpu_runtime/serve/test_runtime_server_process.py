"""`kvtwin serve` as its users meet it: a process with flags, signals and files."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gpu_runtime import live
from gpu_runtime.device import TorchDevice
from gpu_runtime.serve.run import bind, stop_tokens, url_of
from gpu_runtime.serve.server import ServerOptions
from gpu_runtime.serve.text import load_codec
from kvtwin import main
from sim.errors import UserError

torch.set_num_threads(1)

ROOT = Path(__file__).parents[3]
CONFIG = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def arguments(tmp_path):
    """What starts a small server."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    words = f"serve --model {tmp_path}/tiny/config.json --device cpu --gpu cpu --policy vllm-recompute --port 0"
    sizes = "--num-gpu-blocks-override 40 --num-cpu-blocks-override 40 --max-model-len 256"
    return [*words.split(), *sizes.split(), "--out", str(tmp_path / "out")]


@contextmanager
def started(arguments, **environment):
    """A server process and its address; killed at the end if it still runs."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "kvtwin", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, cwd=Path(arguments[-1]).parent, **pipes) as process:
        try:
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line + process.stderr.read()
            yield process, found[0]
        finally:
            process.kill()


def post(url, body, key=None):
    """Status and text of an answer; 0 where there is none."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def events_of(text):
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@contextmanager
def open_stream(url, tokens):
    """A stream whose first token has come, and that."""
    body = {"prompt": [5] * 20, "max_tokens": tokens, "stream": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=300) as response:
        yield response, response.readline()


def test_a_signal_under_load_loses_no_accepted_request(arguments):
    with started(arguments) as (process, url), ThreadPoolExecutor(24) as pool:
        answers = []
        for i in range(24):
            body = {"prompt": [i] * (5 + 3 * i), "max_tokens": 40 + i, "stream": i % 2 == 0}
            answers.append(pool.submit(post, url, body))
        with open_stream(url, 100) as (stream, first):
            process.send_signal(signal.SIGTERM)
            late = post(url, {"prompt": [1], "max_tokens": 1})
            text = first.decode() + stream.read().decode()
        found = [answer.result() for answer in answers]
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    # Refused while it drains, or the port is closed.
    assert late[0] in (503, 0)
    assert len(events_of(text)) == 101
    accepted = [i for i, (status, _) in enumerate(found) if status == 200]
    assert all(status in (200, 503, 0) for status, _ in found)
    for i in accepted:
        if i % 2 == 0:
            assert len(events_of(found[i][1])) == 41 + i
        else:
            assert json.loads(found[i][1])["usage"]["completion_tokens"] == 40 + i
    result = json.loads((Path(arguments[-1]) / "result.json").read_text())
    assert accepted
    assert result["completed"] == len(accepted) + 1
    assert result["ignored"] == 0
    assert result["complete"] is True
    assert result["scenario"]["workload"] == "http"
    assert result["total_output_tokens"] == sum(40 + i for i in accepted) + 100
    assert any((Path(arguments[-1]) / name).exists() for name in ("requests.csv", "requests.parquet"))
    assert "Requests completed" in output
    assert errors == ""


def test_a_second_interrupt_ends_at_once_and_keeps_what_is_finished(arguments):
    # Room for an answer that takes longer than this test.
    more = ["--max-model-len", "4096", "--num-gpu-blocks-override", "260"]
    with started([*arguments[:-2], *more, *arguments[-2:]]) as (process, url):
        assert post(url, {"prompt": [1], "max_tokens": 3})[0] == 200
        with open_stream(url, 4000) as (stream, _):
            process.send_signal(signal.SIGINT)
            while (status := post(url, {"prompt": [1], "max_tokens": 1})[0]) == 200:
                pass
            assert status == 503
            process.send_signal(signal.SIGINT)
            assert '"error"' in stream.read().decode()
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted; what finished is in" in errors
    result = json.loads((Path(arguments[-1]) / "result.json").read_text())
    assert result["completed"] >= 1
    assert result["complete"] is False


class Client(threading.Thread):
    """Waits for a server in this process to say where it is, then does something with it."""

    def __init__(self, monkeypatch, act):
        super().__init__(daemon=True)
        self.act, self.answer = act, None
        self._said = threading.Event()
        monkeypatch.setattr("gpu_runtime.serve.run.url_of", url_of)
        monkeypatch.setattr("builtins.print", self._hear)

    def _hear(self, *words, **more):
        text = " ".join(map(str, words))
        if found := re.search(r"http://\S+$", text):
            self.url = found[0]
            self._said.set()
        more.get("file", sys.stdout).write(text + "\n")

    def run(self):
        assert self._said.wait(300)
        self.answer = self.act(self.url)


def test_a_crash_of_the_engine_ends_the_process_in_one_line(arguments, monkeypatch, capsys):
    build = live.build_device

    def breaking(*parts):
        device = build(*parts)
        execute = device.execute

        def fail(plan):
            if plan.num_decodes:
                raise RuntimeError("the device is gone\nfor good")
            return execute(plan)

        device.execute = fail
        return device

    monkeypatch.setattr("gpu_runtime.serve.run.build_device", breaking)
    client = Client(monkeypatch, lambda url: post(url, {"prompt": [1], "max_tokens": 5}))
    client.start()
    assert main([*arguments]) == 1
    client.join(300)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    status, text = client.answer
    assert (status, json.loads(text)["error"]["message"]) == (500, "the engine failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "the engine failed: RuntimeError: the device is gone" in line
    folder = Path(arguments[-1])
    assert "Traceback" in (folder / "crash.txt").read_text()
    assert json.loads((folder / "result.json").read_text())["complete"] is False


def test_no_memory_to_warm_up_is_told_in_a_line(arguments, monkeypatch, capsys):
    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(TorchDevice, "warm_up", full)
    assert main([*arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvtwin: GPU memory: CUDA out of memory. Tried to allocate 2.00 GiB.: lower --num-gpu")
    assert not (Path(arguments[-1]) / "crash.txt").exists()


def test_the_key_may_come_from_the_environment_and_is_written_nowhere(arguments):
    body = {"prompt": [1], "max_tokens": 2}
    with started([*arguments[:-2], "--served-model-name", "mine", *arguments[-2:]], KVTWIN_API_KEY="s3cret-key") as (
        process,
        url,
    ):
        assert [post(url, body, key)[0] for key in (None, "wrong", "s3cret-key")] == [401, 401, 200]
        process.terminate()
        said = process.communicate(timeout=300)
    assert process.returncode == 0
    written = [path.read_text() for path in Path(arguments[-1]).glob("*.json")]
    assert written
    assert not any("s3cret-key" in text for text in (*said, *written))


def asked(arguments, monkeypatch, capsys, *more):
    """Options, live options, and what is told of a server that ends as it begins."""

    def refuse(setup, table, keep, decoder, live_options, codec, options, bound, *, folder, begin, announce):
        announce()
        bound.close()
        assert (setup.scenario.gpu, setup.scenario.workload) == ("cpu", "http")
        found.append((options, live_options, codec, folder))
        raise UserError("no more")

    found = []
    monkeypatch.setattr("gpu_runtime.serve.run.perform", refuse)
    assert main([*arguments, *more]) == 2
    said = capsys.readouterr()
    return *found[0], re.sub(r":\d+", ":PORT", said.out), re.sub(r":\d+", ":PORT", said.err)


def test_a_server_is_what_was_asked_for(arguments, tmp_path, monkeypatch, capsys):
    model = f"{tmp_path}/tiny/config.json"
    options, live_options, codec, folder, out, error = asked(arguments, monkeypatch, capsys)
    assert options == ServerOptions("tiny", model, 256, 128)
    assert live_options == live.LiveOptions("cpu", None, 0, "auto")
    assert (codec.encode("é"), folder) == ([195 % 128, 169 % 128], tmp_path / "out")
    assert out == "kvtwin: serving tiny with vllm-recompute on cpu, 40 KV blocks: http://127.0.0.1:PORT\n"
    assert error == "kvtwin: no more\n"
    more = ["--api-key", "k", "--max-queue", "1", "--served-model-name", "mine", "--seed", "5", "--quiet"]
    options, live_options, *_, out, error = asked(
        arguments, monkeypatch, capsys, *more, "--attention-backend", "torch", "--host", "0.0.0.0"
    )
    assert options == ServerOptions("mine", model, 256, 128, max_queue=1, api_key="k")
    assert live_options == live.LiveOptions("cpu", None, 5, "torch")
    # Without the key it may not be used.
    assert (out, error) == ("", "kvtwin: no more\n")
    error = asked(arguments, monkeypatch, capsys, "--host", "0.0.0.0")[-1]
    assert error == (
        "kvtwin: warning: anyone who reaches http://0.0.0.0:PORT may use it: give --api-key or --host 127.0.0.1\n"
        "kvtwin: no more\n"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-queue", "0"], "--max-queue: 0 is less than 1: give how many requests may wait"),
        (["--port", "65536"], "--port: 65536 is no port"),
        (["--tokenizer", "nowhere"], "holds no tokenizer.json"),
        (["--policy", "layerkv"], "serve takes one --policy, 2 given"),
        (["--tp", "2"], "--tp: 2 GPUs"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(arguments, capsys, more, message):
    try:
        status = main([*arguments, *more])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_scenario_file_with_traffic_is_refused(arguments, tmp_path, capsys):
    file = tmp_path / "s.toml"
    file.write_text('trace = "x.csv"\n')
    assert main([*arguments, "--scenario", str(file)]) == 2
    assert "trace says which requests come" in capsys.readouterr().err


def test_a_taken_port_is_said_in_one_line():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UserError, match=r"cannot listen \(Address already in use\)"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_end_of_text_tokens_come_from_the_checkpoint(tmp_path):
    assert stop_tokens(None) == stop_tokens(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert stop_tokens(tmp_path) == {5, 7}
    (tmp_path / "config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UserError, match="eos_token_id"):
        stop_tokens(tmp_path)


def test_bytes_stand_in_for_a_tokenizer_one_character_a_token():
    codec = load_codec(None, 101)
    ids = codec.encode("h\N{EURO SIGN}")
    assert ids == [byte % 101 for byte in b"h\xe2\x82\xac"]
    text_of = codec.answer()
    assert all(len(text_of(token)) == 1 and text_of(token).isprintable() for token in range(101))


def test_a_tokenizer_that_is_not_there_is_told(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"holds no tokenizer\.json: name the folder that does"):
        load_codec(tmp_path, 256)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the package tokenizers: pip install 'kvtwin\[serve\]'"):
        load_codec(tmp_path, 256)


def test_a_tokenizer_file_writes_text_whole_characters_at_a_time(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = load_codec(tmp_path, 256)
    text = "a \N{EURO SIGN}\N{SNOWMAN}!"
    ids = codec.encode(text)
    assert len(ids) == len(text.encode())
    text_of = codec.answer()
    pieces = [text_of(token) for token in ids]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    with pytest.raises(UserError, match=r"has token 255, the model 100 tokens"):
        load_codec(tmp_path, 100)
    with pytest.raises(UserError, match=r"has token 255, the model 255 tokens"):
        load_codec(tmp_path, 255)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        load_codec(tmp_path, 256)
