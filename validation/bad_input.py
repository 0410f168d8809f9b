"""Bad input, kills, second writers and full disks, drawn at random: what `docs/reliability.md` promises is tried.

Each kind in `KINDS` makes one case of a random stream: a command of kvtwin on a folder that has results already. What
may come of it: it is accepted, and the folder holds a new result, whole and free of contradictions; or it is refused
with status 2 and a line that names no code, and the folder is as it was. All else is a `Fault`.
"""

import contextlib
import gzip
import io
import json
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from random import Random
from time import monotonic, sleep
from types import FrameType
from typing import Any, Literal, NamedTuple, get_origin

import kvtwin
from sim.errors import UserError
from sim.options.policies import options_of
from sim.options.scenario import Scenario
from sim.options.values import base_type, flag, option_fields
from sim.results.result import RESULT_FILE, read_result
from sim.run.folders import LOCK_FILE, NEW, UNFINISHED, WHOLE_FILE, settle
from sim.systems import POLICIES

MOST_S = 60.0
"""A case that takes longer hangs."""
TRAFFIC = ["--workload", "sharegpt", "--num-prompts", "4", "--request-rate", "2", "--gpu", "l20", "--quiet"]
POOLS = ["--prefill-replicas", "1", "--decode-replicas", "1", "--link-gbps", "100"]
POOLED = ("distserve", "splitwise", "mooncake", "memserve")
ODD = ["-1", "-0.5", "0", "nan", "inf", "-inf", "1e-320", "1e300", str(2**62), str(2**64), "", " ", "x", "a b",
       "\u00e9", "1,5", "0x10", "true", "None", "[]", "{}", "../..", "\u202e", "1e999"]  # fmt: skip
USUAL = ["1", "2", "7", "16", "300", "0.01", "0.5", "3.7", "true", "false"]
FEW = ("num_prompts", "replicas", "prefill_replicas", "decode_replicas", "output_len", "input_len", "turns", "tp")
"""Options of which many are minutes of work, and no fault: only what is refused is drawn."""


class Fault(NamedTuple):
    """A case that broke a promise."""

    what: Literal["traceback", "hang", "status", "lost", "accepted nonsense", "unreadable", "words"]
    told: str
    case: str


class Hang(BaseException):
    """A case took too long."""


class Bench:
    """A folder with results, and what a command did with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        status, error, _ = command(["run", *TRAFFIC, "--out", str(self.out)])
        if status:
            raise UserError(f"the first run fails: {error}")
        self.before = contents(self.out)

    def judge(self, words: Sequence[str], *, nonsense: bool = False, writes: bool = True) -> "str | Fault":
        """`accepted`, `refused`, or the fault of a command that is to write into `out`, or only to read."""
        case = " ".join(words)
        begin_s = monotonic()
        status, error, raised = command(words)
        if isinstance(raised, Hang) or monotonic() - begin_s > MOST_S:
            return Fault("hang", f"{monotonic() - begin_s:.0f} s", case)
        if raised is not None:
            return Fault("traceback", f"{type(raised).__name__}: {raised}", case)
        now = contents(self.out)
        if status == 2:
            lines = error.splitlines()
            if not lines or "Traceback" in error or not lines[-1].startswith("kvtwin"):
                return Fault("words", error[-300:], case)
            return Fault("lost", f"{self.before.keys() ^ now.keys()}", case) if now != self.before else "refused"
        if status != 0:
            return Fault("status", str(status), case)
        if nonsense:
            self.before = now
            return Fault("accepted nonsense", error[-200:], case)
        if writes:
            try:
                result = read_result(self.out / RESULT_FILE)
            except UserError as broken:
                return Fault("unreadable", str(broken), case)
            finally:
                self.before = now
            if not result.complete:
                return Fault("unreadable", "not complete", case)
        return "accepted"


def command(words: Sequence[str]) -> tuple[int, str, BaseException | None]:
    """Status, what is told on standard error, and what was raised, of a command in this process."""
    told = io.StringIO()

    def late(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            return kvtwin.main(list(words)), told.getvalue(), None
    except SystemExit as end:
        return int(end.code or 0), told.getvalue(), None
    except BaseException as error:
        return -1, told.getvalue(), error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def contents(folder: Path) -> dict[str, bytes]:
    """The results below a folder, without locks."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {name: path.read_bytes() for name, path in names.items() if name.split("/")[0] not in (NEW, UNFINISHED)}


# -- options -----------------------------------------------------------------------------------------------------------


NAMING = ("trace", "workload", "goodput", "model", "profile", "engine_profile", "tokenizer", "autoscale")
"""Options whose values are names or languages of their own."""


def options(bench: Bench, draw: Random) -> "str | Fault":
    """Flags of a scenario and of a policy, some with values that mean nothing."""
    name = draw.choice([*POLICIES])
    words = [*TRAFFIC, *(POOLS if name in POOLED else [])]
    nonsense = False
    for field, hint in draw.sample(option_fields(Scenario), draw.randint(0, 3)):
        if field.name in NAMING:
            continue
        value, refused = _value(draw, base_type(hint), few=field.name in FEW)
        above, least = field.metadata["above"], field.metadata["least"]
        with contextlib.suppress(ValueError):
            refused |= above is not None and not float(value) > above
            refused |= least is not None and not float(value) >= least
        if base_type(hint) is bool:
            words.append(flag(field.name))
            continue
        words += [f"{flag(field.name)}={value}"]
        nonsense |= refused
    own = options_of(POLICIES[name])
    chosen = []
    for option in draw.sample(own, min(len(own), draw.randint(0, 2))):
        value, refused = _value(draw, base_type(option.hint))
        if "," not in value:
            chosen.append(f"{option.name.replace('_', '-')}={value}")
            nonsense |= refused
    policy = f"{name}:{','.join(chosen)}" if chosen else name
    return bench.judge(["run", *words, "--policy", policy, "--out", str(bench.out)], nonsense=nonsense)


def _value(draw: Random, kind: Any, *, few: bool = False) -> tuple[str, bool]:  # noqa: ANN401
    """A value for an option of a type, and whether it has to be refused whatever the option is."""
    choices = kind.__args__ if get_origin(kind) is Literal else ()
    value = draw.choice(ODD if few or draw.random() < 0.35 else [*map(str, choices)] or USUAL)
    if choices:
        return value, value not in map(str, choices)
    if kind not in (int, float):
        return value, False
    try:
        number = float(value)
    except ValueError:
        return value, True
    return ("-1", True) if few and number >= 1 else (value, number != number or (kind is int and number % 1 != 0))


# -- files -------------------------------------------------------------------------------------------------------------


def traces(bench: Bench, draw: Random) -> "str | Fault":
    """A trace with rows or bytes that are none."""
    good = [f"{i * 0.5},{draw.randint(1, 40)},{draw.randint(1, 5)}" for i in range(draw.randint(0, 30))]
    rows, nonsense = list(good), False
    if rows and draw.random() < 0.5:
        place, column = draw.randrange(len(rows)), draw.randrange(3)
        cells = rows[place].split(",")
        cells[column] = draw.choice(["-1", "nan", "x", "", "-0.001", "1e999"])
        rows[place], nonsense = ",".join(cells), True
    data = "\n".join(["arrival_s,prompt_tokens,output_tokens", *rows, ""]).encode()
    if not nonsense:
        data = _damaged(data, draw)
    path = bench.folder / f"trace.{draw.choice(['csv'] * 8 + ['jsonl', 'json', 'csv.gz'])}"
    path.write_bytes(gzip.compress(data)[: draw.choice([None, None, 20])] if path.suffix == ".gz" else data)
    words = ["run", "--trace", str(path), "--num-prompts", "40", "--gpu", "l20", "--quiet", "--out", str(bench.out)]
    return bench.judge(words, nonsense=nonsense)


def _damaged(data: bytes, draw: Random) -> bytes:
    for _ in range(draw.randint(0, 3)):
        place = draw.randrange(len(data) + 1)
        what = draw.choice(
            [b"\0", b"\xff", b"\xed\xa0\x80", b'"', b",", b"\n", b"-", b"9" * 30, b"nan", b"[", b"{", b""]
        )
        data = data[:place] + what + data[place + draw.choice([0, 1, 5]) :]
    return data


def json_files(bench: Bench, draw: Random) -> "str | Fault":
    """A saved result with one value that it did not have, which is read again."""
    good = (bench.out / RESULT_FILE).read_bytes()
    data = json.loads(good)
    holder, keys = data, []
    while True:
        key = draw.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
        keys.append(str(key))
        if not isinstance(holder[key], dict | list) or not holder[key] or draw.random() < 0.1:
            break
        holder = holder[key]
    before = holder[key]
    holder[key] = draw.choice([None, -1, 0, 1e300, float("nan"), "x", "", [], {}, True, [None], 2**70, "\ud800"])
    # What it was, or another number where any goes; a type that it never has must be refused.
    nonsense = isinstance(before, int | float) and isinstance(holder[key], str | list | dict) and len(keys) == 1
    place = bench.folder / "read"
    place.mkdir(exist_ok=True)
    (place / RESULT_FILE).write_text(
        json.dumps(data) if draw.random() < 0.9 else json.dumps(data)[: draw.randrange(99)]
    )
    for name, found in bench.before.items():
        if name.startswith("requests"):
            (place / name).write_bytes(found)
    words = ["explain", str(place), "--request", str(draw.randrange(6))]
    return bench.judge(words, nonsense=nonsense, writes=False)


def toml_files(bench: Bench, draw: Random) -> "str | Fault":
    """A scenario file, or a study that is too large, with lines that are none."""
    if draw.random() < 0.3:
        size = draw.choice([10**6, 10**9, 10**12, 10**18])
        axes = draw.choice([
            f"[sweep]\nrepeats = {size}", f"[sweep.grid]\nrequest-rate = {{ log = [1, 8], num = {size} }}",
            f"[sweep.random]\nsamples = {size}\nseed = [1]",
            "[sweep.grid]\n" + "".join(f"{name} = {[*range(1, 400)]}\n" for name in ("seed", "max-num-seqs")),
        ])  # fmt: skip
        (bench.folder / "s.toml").write_text(f'workload = "fixed"\nnum-prompts = 2\n{axes}\n')
        words = ["sweep", str(bench.folder / "s.toml"), "--quiet", "--jobs", "1", "--out", str(bench.folder / "study")]
        return bench.judge(words, nonsense=True, writes=False)
    lines = ['workload = "fixed"', "num-prompts = 3", "input-len = 20", "output-len = 3", 'gpu = "l20"']
    field = draw.choice(fields(Scenario)).name
    odd = draw.choice(['"x"', "-1", "nan", "[1, 2]", "{ a = 1 }", '"a\\u0000b"', "1979-05-27", "true", "2.5", '""'])
    if field not in ("replicas", "trace", "workload", "num_prompts"):
        lines.append(f"{field.replace('_', '-')} = {odd}")
    path = bench.folder / "s.toml"
    path.write_bytes(_damaged("\n".join(lines).encode(), draw) if draw.random() < 0.4 else "\n".join(lines).encode())
    words = ["run", "--scenario", str(path), "--num-prompts", "3", "--quiet", "--out", str(bench.out)]
    return bench.judge(words)


# -- processes ---------------------------------------------------------------------------------------------------------


def _forked(act: Callable[[], int]) -> int:
    """The id of a process that acts, ends with that status and leaves nothing else."""
    child = os.fork()
    if child:
        return child
    # Wherever these led, a limit of file sizes would hold there, too.
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until it ends
    os.dup2(sys.stderr.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    try:
        os._exit(act())
    except BaseException:
        os._exit(99)


def _run_words(bench: Bench, draw: Random, where: str = "") -> list[str]:
    words = ["--seed", str(draw.randrange(10**6)), "--num-prompts", str(draw.choice([3, 300, 3000]))]
    out = ["--out", str(bench.out / where)]
    if draw.random() < 0.3:
        return ["compare", *TRAFFIC, *words, *out, "--no-figures", "--policy", "vllm-v1", "--policy", "vllm-recompute"]
    return ["run", *TRAFFIC, *words, *out, *(["--timeline"] if draw.random() < 0.3 else [])]


def _is_whole(bench: Bench) -> "Fault | None":
    """None where the folder has one command's results, all of them, and can be used again."""
    settle(bench.out)
    if (bench.out / "comparison.json").exists():
        said = json.loads((bench.out / "comparison.json").read_text())
        found = {path.parent.name for path in bench.out.glob("*/" + RESULT_FILE)} - {UNFINISHED}
        if set(said["policies"]) != found or (bench.out / RESULT_FILE).exists():
            return Fault("lost", f"compared {said['policies']}, found {found}", "")
        return None
    tables = sum((bench.out / f"requests.{kind}").exists() for kind in ("csv", "parquet"))
    try:
        result = kvtwin.load_result(bench.out)
    except UserError as error:
        return Fault("unreadable", str(error), "")
    if tables != 1 or len(result.requests) != result.result.num_prompts or not result.result.complete:
        return Fault("unreadable", f"{tables} tables, {len(result.requests)} rows", "")
    return None


def kills(bench: Bench, draw: Random) -> "str | Fault":
    """SIGKILL at a random instant: the results of before, or the new ones."""
    words = _run_words(bench, draw)
    child = _forked(lambda: kvtwin.main(words))
    awaited = draw.choice([None, bench.out / NEW, bench.out / NEW / "requests.parquet", bench.out / NEW / WHOLE_FILE])
    end_s = monotonic() + 2.0
    while awaited is not None and not awaited.exists() and monotonic() < end_s:
        pass
    # The last moments, when files are put in place, are the shortest.
    sleep(draw.uniform(0.0, 0.002 if awaited is not None and awaited.name == WHOLE_FILE else 0.5))
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    fault = _is_whole(bench)
    now = contents(bench.out)
    changed, bench.before = now != bench.before, now
    if fault is not None:
        return fault._replace(case=" ".join(words))
    if not killed and os.waitstatus_to_exitcode(status):
        return Fault("status", str(os.waitstatus_to_exitcode(status)), " ".join(words))
    return "new results" if changed else "those of before"


def writers(bench: Bench, draw: Random) -> "str | Fault":
    """Two commands at once, on one folder or on one within the other: results of one, or of both in turn."""
    several = [_run_words(bench, draw), _run_words(bench, draw, draw.choice(["", "", "vllm-v1"]))]
    children = [_forked(lambda words=words: kvtwin.main(words)) for words in several]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    case = f"{' '.join(several[0])} | {' '.join(several[1])}"
    if not set(statuses) <= {0, 2}:
        return Fault("status", str(statuses), case)
    fault = _is_whole(bench)
    bench.before = contents(bench.out)
    if fault is not None:
        return fault._replace(case=case)
    return "one refused" if 2 in statuses else "in turn"


def full_disks(bench: Bench, draw: Random) -> "str | Fault":
    """No file may be longer than a drawn number of bytes: refused, and all is as it was."""
    words, most = _run_words(bench, draw), int(10 ** draw.uniform(0.0, 6.5))

    def act() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        return kvtwin.main(words)

    status = os.waitstatus_to_exitcode(os.waitpid(_forked(act), 0)[1])
    case = f"{most} bytes: {' '.join(words)}"
    if status not in (0, 2):
        return Fault("status", str(status), case)
    fault, now = _is_whole(bench), contents(bench.out)
    changed, bench.before = now != bench.before, now
    if fault is not None:
        return fault._replace(case=case)
    return Fault("lost", "refused, and the folder is another", case) if status and changed else (
        "refused" if status else "accepted")  # fmt: skip


# -- HTTP --------------------------------------------------------------------------------------------------------------


def http_bodies(bench: Bench, draw: Random) -> "str | Fault":
    """Bodies of requests to `serve`, as its reader has them: an answer is asked for, or status 4xx with the field."""
    from gpu_runtime.model.sampling import GREEDY  # noqa: PLC0415 - needs torch
    from gpu_runtime.serve.request import Refused, read_ask  # noqa: PLC0415 - needs aiohttp

    body: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 4}
    name, value, nonsense = "", None, False
    if draw.random() < 0.8:
        name = draw.choice(["prompt", "max_tokens", "min_tokens", "temperature", "top_p", "min_p", "seed", "n",
                            "stop", "stop_token_ids", "stream", "stream_options", "ignore_eos",
                            "top_k", "logprobs"])  # fmt: skip
        value = draw.choice([-1, 0, 1, 2.5, 1e30, 2**70, "x", "", [], {}, [None], [[]], True, None, [-1]])
        body[name] = value
        numbers = ("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "seed", "n", "top_k")
        nonsense = name in numbers and isinstance(value, str | list | dict)
        nonsense |= (name, value) in {("temperature", -1), ("top_p", 1e30), ("seed", 2.5), ("min_p", 1e30)} if not (
            isinstance(value, list | dict)) else False  # fmt: skip
        nonsense |= name == "min_tokens" and isinstance(value, int) and not isinstance(value, bool) and value > 4
    data = json.dumps(body).encode()
    try:
        read_ask(data if name else _damaged(data, draw), chat=False, default=GREEDY, text_of=lambda _: "")
    except Refused:
        return "refused"
    except Exception as error:
        return Fault("traceback", f"{type(error).__name__}: {error}", data.decode())
    return Fault("accepted nonsense", "", data.decode()) if nonsense else "accepted"


Kind = Callable[[Bench, Random], "str | Fault"]
KINDS: dict[str, Kind] = {
    "options": options, "traces": traces, "JSON": json_files, "TOML": toml_files, "HTTP": http_bodies, "kills": kills,
    "two writers": writers, "full disks": full_disks,
}  # fmt: skip


def try_cases(kind: str, seed: int, cases: int) -> Iterator["str | Fault"]:
    """The outcome of each case; the same seed draws the same cases."""
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place))
        for case in range(cases):
            yield KINDS[kind](bench, Random(f"{kind} {seed} {case}"))


def counted(outcomes: Iterator["str | Fault"]) -> tuple[Counter[str], list[Fault]]:
    """How often each outcome came, and the faults."""
    counts, faults = Counter[str](), list[Fault]()
    for outcome in outcomes:
        if isinstance(outcome, Fault):
            faults.append(outcome)
        counts[outcome.what if isinstance(outcome, Fault) else outcome] += 1
    return counts, faults
