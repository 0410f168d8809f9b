"""What odd files of traces are read as or refused with, format by format, and the requests that workloads make."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import islice, product
from typing import Any

from odd_traces import FILE, HEADERS, NAMED, ROWS, TIMES, TOKENS, USUAL, files, lax, read, text_of, told
from pinned import ROOT, Answers, Table, digest

sys.path.insert(0, str(ROOT / "tests/traces"))

import test_traces_clients as clients
import test_traces_served as served

from traces.generators import generate
from traces.readers import FORMATS
from traces.resample import resample
from traces.served import read_served
from traces.workloads import WORKLOADS


def reading(name: str) -> Iterator[str]:
    """A format with every oddity."""
    for what, data in files(name):
        yield f"{what}: {read(data, **lax(name))}"
    for at, field in product((0, 2), range(3)):
        for value in TIMES if not field else TOKENS:
            rows = [list(row) for row in USUAL]
            rows[at][field] = value
            yield f"row {at} field {field} {value!r}: {read(text_of(name, rows), **lax(name))}"
    for policy in ("drop", "one", "none"):
        zeros = text_of(name, [("05.5", 0, 9), *USUAL, ("07", 9, 0), ("07", 0, 0), ("08", 9, 9)])
        yield f"zeros {policy}: {read(zeros, zero_tokens=policy, **lax(name))}"
        yield f"only zeros {policy}: {read(text_of(name, [('05', 0, 0)]), zero_tokens=policy, **lax(name))}"
    mixed = text_of(name, [("07", 4, 4), *USUAL, ("02", 5, 5)])
    yield f"sorted: {read(mixed, sort=True, **lax(name))}"
    for unit in ("s", "ms", "us", "ns", "h"):
        yield f"unit {unit}: {read(text_of(name, USUAL), time_unit=unit, **lax(name))}"
    for form in (*FORMATS, "kvtwn"):
        yield f"as {form}: {read(text_of(name, USUAL), format=form)}"


def naming() -> Iterator[str]:
    """Hash ids, sessions and priorities."""
    for row in NAMED:
        prompt, output, ids, block, more, urgency = row
        for quoted, given in product(("", '"'), (None, 16)):
            line = f"0,{prompt},{output},s,{quoted}{ids}{quoted},{block},{more},{urgency}\n"
            yield f"{line.strip()} {given}: {read(HEADERS['kvtwin'] + chr(10) + line, hash_block_tokens=given)}"
        for name, given in product(("mooncake", "bailian"), (None, 16)):
            found: dict[str, object] = {"timestamp": 1.5, "input_length": prompt, "output_length": output}
            for field, value in (("hash_ids", ids), ("output_hash_ids", more)):
                if value:
                    found[field] = [int(word) if word.lstrip("-").isdecimal() else word for word in value.split()]
            if urgency:
                found["priority"] = (
                    float(urgency) if urgency == "1.5" else None if urgency == "x" else int(float(urgency))
                )
            if name == "bailian":
                found |= {"chat_id": 7, "parent_chat_id": -1}
            line = json.dumps(found) + "\n"
            yield f"{line.strip()} {given}: {read(line, hash_block_tokens=given)}"
    chats = [(3, -1), (4, 3), (5, None), (6, 4), ("a", 5), (9, 8), (3, 6)]
    lines = [
        {"chat_id": chat, "parent_chat_id": parent, "timestamp": 1, "input_length": 9, "output_length": 9}
        for chat, parent in chats
    ]
    yield f"chats: {read(chr(10).join(map(json.dumps, lines)))}"
    for value in (0, -1, 10**9, 10**9 + 1):
        for name in ("hash_block_tokens", "default_prompt_tokens", "default_output_tokens"):
            yield f"{name} {value}: {read(text_of('kvtwin', USUAL), **{name: value})}"


def generated(name: str, **given: Any) -> list[object]:
    """The second and third request, those where a further chunk is drawn, and digests of the first and last ones."""
    requests = [request[:] for request in generate(name, num_prompts=40 if given else 4200, **given)]
    return [*requests[1:3], *requests[4096:4098], digest(requests[:40]), digest(requests[-100:])]


USUALLY = ({}, {"seed": 5}, {"input_len": 60, "output_len": 7}, {"burstiness": 0.5}, {"request_rate": 3.0})
OPTIONS: dict[str, list[dict[str, Any]]] = {name: [*USUALLY, {"request_rate": float("inf")}] for name in WORKLOADS}
OPTIONS["uniform"] += [{"range_ratio": ratio} for ratio in (0, 0.25, 1, 1.5)] + [{"input_len": 1, "output_len": 2}]
OPTIONS["ramp"] += [{"end_rate": 0.5}, {"end_rate": 1.0}, {"end_rate": 1e9}, {"request_rate": 5e8}]
OPTIONS["burst"] += [{"burst_factor": 3.0}, {"burst_period": 20.0}, {"burst_duration": 59.0}, {"burst_duration": 60.0}]
OPTIONS["sessions"] += [
    {"turns": 1.0}, {"think_time": 1.0}, {"shared_prefix": 0}, {"shared_prefix": 40, "prefix_groups": 3},
    {"range_ratio": 0.0}, {"max_context": 1200}, {"max_context": 1087}, {"hash_block_tokens": 100},
    {"range_ratio": 0.0, "max_context": 1281}, {"range_ratio": 0.0, "max_context": 1280},
]  # fmt: skip

OPTIONS["documents"] += [{"documents": 2, "document_len": 96}, {"corpus": 6}, {"skew": 0}, {"hash_block_tokens": 64}]


def in_folder(lines: Callable[[], Iterator[str]]) -> list[str]:
    """Of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return [*lines()]


def ask_read(name: str) -> Answers:
    """Files of a format; of kvtwin's own also hash ids, sessions and priorities."""
    found = {"read": in_folder(lambda: reading(name))}
    return found | ({"names": in_folder(naming)} if name == "kvtwin" else {})


def again(name: str, block_s: float, seed: int) -> list[object]:
    """The first requests of traffic like a workload's, drawn in blocks."""
    like = resample([*generate(name, num_prompts=30, request_rate=3.0)], block_s, seed)
    return [request[:] for request in islice(like, 70)]


def ask_made(name: str) -> Answers:
    """Requests of a workload, by its options, and of traffic like it."""
    drawn = [f"{case}: {told(again, name, *case)}" for case in ((2.0, 0), (2.0, 1), (11.5, 2), (1e6, 3), (1.0, -1))]
    return {"made": [f"{given}: {told(generated, name, **given)}" for given in OPTIONS[name]], "again": drawn}


CLIENTS: dict[str, Any] = {**clients.FILES, "vllm-bench": [served.RESULT]}
ODD = (None, "x", -1, 1e300, 10**400, "9" * 5000, True, [])
GONE = object()


def changed(document: Any, at: tuple[Any, ...], value: object) -> Any:
    """A copy in which one value is another, or gone."""
    found = held = deepcopy(document)
    for key in at[:-1]:
        held = held[key]
    if value is GONE:
        del held[at[-1]]
    else:
        held[at[-1]] = value
    return found


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands, of each container before what is in it."""
    if at:
        yield at
    inside = document.items() if isinstance(document, dict) else enumerate(document[:3])
    for key, value in inside:
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))
        else:
            yield (*at, key)


def measuring(name: str) -> Iterator[str]:
    """What a client kept, as a trace and as a server's run: each value gone and others in its place."""
    document = CLIENTS[name] if isinstance(CLIENTS[name], list) else [CLIENTS[name]]
    cases = [((), None), *product(places(document), (GONE, *ODD))]
    for at, value in cases:
        rows = changed(document, at, value) if at else document
        text = "".join(json.dumps(row) + "\n" for row in rows)
        words = f"{list(at)} {'gone' if value is GONE else value!r}"
        yield f"{words}: {read(text, tokenizer='bytes:4')}"
        yield f"{words}, served: {told(run_of)}"


def run_of() -> list[object]:
    """Of the file."""
    run = read_served(FILE)
    return [len(run.requests), run.ttft_s, run.e2el_s, run.gaps_s, run.left_out]


TABLES = {
    "traces": Table(list(ROWS), ask_read),
    "workloads": Table(list(OPTIONS), ask_made),
    "clients": Table(list(CLIENTS), lambda name: {"read": in_folder(lambda: measuring(name))}),
}
