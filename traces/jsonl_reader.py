"""Traces of one JSON object a line: Mooncake, Bailian and vLLM's custom data set."""

import json
from collections.abc import Iterable, Mapping
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from traces.fields import Where
from traces.hash_ids import check_hashes, check_output_hashes, hashes_fit, output_hashes_fit
from traces.rare_fields import RARE_FIELDS, check_calls_alone
from traces.request import Request
from traces.rows import Columns, LineReader, ReadOptions, Row

JsonObject = Mapping[str, object]


class JsonlFormat(NamedTuple):
    """Which keys hold what, the unit of the times, and the tokens of a hash block."""

    time: str
    prompt: str
    output: str
    unit: str
    block: int
    session: str = ""
    parent: str = ""

    @property
    def required(self) -> tuple[str, ...]:
        """The keys that each object must have."""
        return tuple(name for name in (self.time, self.prompt, self.output, self.session) if name)


# In the order of detection.
JSONL_FORMATS = {
    # Alibaba's traces chain turns by chat_id and parent_chat_id (-1 at the root); hash blocks are of 16 tokens.
    "bailian": JsonlFormat("timestamp", "input_length", "output_length", "s", 16, "chat_id", "parent_chat_id"),
    # Mooncake FAST'25: milliseconds, hash blocks of 512 tokens, the last one perhaps partly filled.
    "mooncake": JsonlFormat("timestamp", "input_length", "output_length", "ms", 512),
}


def parse_object(where: Where, line: str) -> JsonObject:
    """Return the JSON object on a line, or raise the error that shows what is there."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        detail = f"is not JSON ({str(error).split(':')[0].lower()})"
        raise where.error("line", line.strip(), detail, "correct or delete the line") from None
    if not isinstance(value, dict):
        raise where.error("line", line.strip(), "is not a JSON object", "write one object a line")
    return value


def needed(where: Where, row: JsonObject, name: str) -> object:
    """Return `row[name]`, or raise the error that lists the keys there are."""
    if name not in row:
        raise where.error("keys", ",".join(row), f"lack {name!r}", f"add {name!r}, or name another format")
    return row[name]


def _ids(where: Where, row: JsonObject, name: str) -> tuple[int, ...]:
    ids = row.get(name) or ()
    if not isinstance(ids, list | tuple) or not _only(int, ids):
        raise where.error(name, ids, "is not a list of whole numbers", "correct or delete the row")
    return tuple(ids)


def _only(kind: type, values: Iterable[object]) -> bool:
    return set(map(type, values)) <= {kind}


class JsonlReader(LineReader):
    """Reads Mooncake's and Bailian's traces."""

    def __init__(self, path: Path, options: ReadOptions, jsonl_format: JsonlFormat) -> None:
        self.format = jsonl_format
        self.default_unit = jsonl_format.unit
        self.time_field = jsonl_format.time
        super().__init__(path, options)
        self.block = options.hash_block_tokens or jsonl_format.block
        self.roots: dict[str, str] = {}  # chat id -> session, the first chat of its chain

    def fast(self, text: str) -> Columns:
        """Return the columns of a block of well-formed objects."""
        form = self.format
        rows = list(map(json.loads, text.split("\n")))
        prompts, outputs = [row[form.prompt] for row in rows], [row[form.output] for row in rows]
        times = [row[form.time] for row in rows]
        if not (_only(int, prompts) and _only(int, outputs) and set(map(type, times)) <= {int, float}):
            raise TypeError("not numbers")
        hashes = [tuple(row.get("hash_ids") or ()) for row in rows]
        if not all(map(_only, repeat(int), hashes)):
            raise TypeError("hash ids")
        blocks = [self.block if ids else 0 for ids in hashes]
        if not all(map(self._fit, prompts, hashes)):
            raise ValueError("hash ids")
        output_hashes = [tuple(row.get("output_hash_ids") or ()) for row in rows] if "output_hash_ids" in text else []
        if any(output_hashes) and not (
            all(map(_only, repeat(int), output_hashes))
            and all(map(output_hashes_fit, prompts, outputs, hashes, blocks, output_hashes))
        ):
            raise ValueError("output hash ids")
        priorities = [row.get("priority", 0) for row in rows] if "priority" in text else []
        if not _only(int, priorities):
            raise TypeError("priorities")
        sessions = [self._session(row) for row in rows] if form.session else ()
        where = Where(self.path, 0)  # what is wrong is told once rows are read one by one
        told = [
            [f.of_json(where, row.get(f.name), p, o) for row, p, o in zip(rows, prompts, outputs, strict=True)]
            if f.name in text
            else ()
            for f in RARE_FIELDS
        ]
        if any(told[0]) and any(output_hashes):
            raise ValueError("tool calls")
        named = (sessions, hashes, blocks, output_hashes, priorities)
        return Columns(list(map(float, times)), prompts, outputs, *named, *told)

    def _fit(self, prompt: int, hashes: tuple[int, ...]) -> bool:
        # Bailian hashes what its cache saw, which may be less than the prompt (images, system text): never more.
        return hashes_fit(prompt, hashes, self.block) or bool(self.format.parent and len(hashes) * self.block <= prompt)

    def _session(self, row: JsonObject) -> str:
        chat, parent = row[self.format.session], row.get(self.format.parent, -1)
        self.roots[str(chat)] = root = self.roots.get(str(parent), str(chat))
        return root

    def row(self, where: Where, line: str) -> Row:
        """Return one row, or name its first wrong field."""
        form, row = self.format, parse_object(where, line)
        zero_allowed = self.options.zero_tokens != "error"
        shown = needed(where, row, form.time)
        time = where.number(form.time, shown)
        prompt = where.tokens(form.prompt, needed(where, row, form.prompt), zero_allowed)
        output = where.tokens(form.output, needed(where, row, form.output), zero_allowed)
        hashes = _ids(where, row, "hash_ids")
        if not self._fit(prompt, hashes):
            check_hashes(where, prompt, hashes, self.block)
        output_hashes = _ids(where, row, "output_hash_ids")
        check_output_hashes(where, prompt, output, hashes, self.block, output_hashes)
        urgency = row.get("priority")
        priority = 0 if urgency is None else where.whole("priority", urgency)
        session = ""
        if form.session:
            needed(where, row, form.session)
            session = self._session(row)
        block = self.block if hashes else 0
        told = [field.of_json(where, row.get(field.name), prompt, output) for field in RARE_FIELDS]
        check_calls_alone(where, row.get(RARE_FIELDS[0].name), told[0], output_hashes)
        request = Request(0, time, prompt, output, session, hashes, block, output_hashes, priority, *told)
        return Row(shown, request)
