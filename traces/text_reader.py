"""Data sets of prompts in words: vLLM's custom JSONL and ShareGPT's JSON. Neither has times: all requests arrive at 0.

Lengths come from the row itself (`prompt_tokens`, `output_tokens`), else from a tokenizer, else from a given default.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from traces.errors import TraceError
from traces.fields import Where
from traces.files import MOST_LINE_CHARS, pieces
from traces.jsonl_reader import JsonObject, parse_object
from traces.request import Request
from traces.rows import Columns, LineReader, Reader, ReadOptions, Row

PROMPT_KEYS = ("prompt_tokens", "prompt_len", "input_length", "input_tokens")
OUTPUT_KEYS = ("output_tokens", "output_len", "output_length", "completion_tokens")
LENGTH_REMEDY = "give `--tokenizer`, or `--default-prompt-tokens` and `--default-output-tokens`"
ROWS_AT_ONCE = 256


def load_tokenizer(spec: str) -> Callable[[str], int]:
    """Return the function from a text to its number of tokens that `spec` names.

    `bytes:4` estimates one token for each 4 bytes of UTF-8 (an estimate: it needs no tokenizer). Anything else is a
    `tokenizer.json` or the folder that holds one, read by the package `tokenizers` where that is installed.
    """
    if spec.startswith("bytes:"):
        per_token = spec.removeprefix("bytes:")
        if not per_token.isdecimal() or int(per_token) < 1:
            raise TraceError(f"tokenizer {spec!r}: {per_token!r} is no number of bytes; write for example bytes:4")
        return lambda text: -(-len(text.encode()) // int(per_token))
    path = Path(spec) / "tokenizer.json" if Path(spec).is_dir() else Path(spec)
    if not path.is_file():
        raise TraceError(f"tokenizer {spec!r}: no such file; give a tokenizer.json, its folder, or bytes:4")
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found]  # noqa: PLC0415  (an optional package)
    except ImportError:
        raise TraceError(f"tokenizer {spec!r}: needs `pip install tokenizers`; or estimate with bytes:4") from None
    try:
        encode: Any = Tokenizer.from_file(str(path)).encode
    except Exception as error:  # the package raises plain Exception
        raise TraceError(f"{path}: not a tokenizer ({error}); give the tokenizer.json of a model") from None
    return lambda text: len(encode(text).ids)


def lengths(
    where: Where,
    row: JsonObject,
    options: ReadOptions,
    texts: Sequence[object] = (None, None),
    keys: Sequence[tuple[str, ...]] = (PROMPT_KEYS, OUTPUT_KEYS),
    *,
    zero_allowed: bool = True,
) -> tuple[int, int]:
    """Tokens of the prompt and of the output: the row's own, else the tokenizer's count of the text, else the default.

    TraceError where none of them says how many.
    """

    def found(names: tuple[str, ...], text: object, default: int | None) -> int:
        for name in names:
            if row.get(name) is not None:
                return where.tokens(name, row[name], zero_allowed)
        if isinstance(text, str) and options.tokenizer is not None:
            return where.tokens(f"{names[0]} (counted)", options.tokenizer(text), zero_allowed)
        if default is None:
            raise where.error(names[0], None, "is not given", LENGTH_REMEDY)
        return default

    prompt = found(keys[0], texts[0], options.default_prompt_tokens)
    return prompt, found(keys[1], texts[1], options.default_output_tokens)


class VllmCustomReader(LineReader):
    """`vllm bench serve --dataset-name custom`: objects of `prompt` and, optionally, `output_tokens`."""

    rebased = False

    def fast(self, text: str) -> Columns:
        """Leave every block to `row`: counting tokens dwarfs what could be saved."""
        raise ValueError

    def row(self, where: Where, line: str) -> Row:
        """Return one row, or name its first wrong field."""
        row, zero_allowed = parse_object(where, line), self.options.zero_tokens != "error"
        # A custom data set has no answers in words: only a number or the default can say how long they are.
        prompt, output = lengths(where, row, self.options, (row.get("prompt"), None), zero_allowed=zero_allowed)
        return Row(0, Request(0, 0.0, prompt, output))


def json_objects(path: Path) -> Iterator[tuple[int, object]]:
    """Yield (line, value) for each element of a JSON array, or of a run of values, without holding the file."""
    decoder, buffer, line, missing, is_last = json.JSONDecoder(), "", 1, 0, False
    blocks = pieces(path)
    while True:
        kept = buffer.lstrip(" \t\r\n,[]")
        line += buffer.count("\n", 0, len(buffer) - len(kept))
        buffer = kept
        # An element longer than the buffer is tried again only once the buffer has doubled: linear, not quadratic.
        if len(buffer) >= missing:
            try:
                value, end = decoder.raw_decode(buffer)
            except RecursionError:
                raise Where(path, line).error("element", buffer, "is nested too deeply", "is it a trace?") from None
            except ValueError:
                missing = 2 * len(buffer)
            else:
                yield line, value
                line += buffer.count("\n", 0, end)
                buffer, missing = buffer[end:], 0
                continue
        block = next(blocks, None)
        if len(buffer) > MOST_LINE_CHARS:
            raise Where(path, line).error(
                "element", buffer, f"is longer than {MOST_LINE_CHARS} characters", "is it a trace?"
            )
        if block is not None:
            buffer += block
        elif not buffer:
            return
        elif is_last:
            raise Where(path, line).error("element", buffer, "is not whole JSON", "download the file again")
        else:
            # Nothing more comes: what is there may be whole though it has not doubled.
            missing, is_last = 0, True


class ShareGptReader(Reader):
    """ShareGPT's conversations, read as `vllm bench serve --dataset-name sharegpt` reads them.

    The first turn is the prompt and the second the answer; a conversation of fewer turns is skipped. With
    `sharegpt_filter` (the default) so is one with fewer than 4 prompt or answer tokens, more than 1,024 prompt tokens
    or more than 2,048 together: vLLM's own rule. `skipped` counts them.
    """

    rebased = False

    def raw_columns(self) -> Iterator[Columns]:
        """Yield the conversations in file order, all at time 0."""
        prompts: list[int] = []
        outputs: list[int] = []
        for line, value in json_objects(self.path):
            lengths = self._lengths(Where(self.path, line), value)
            if lengths is None:
                self.skipped += 1
                continue
            prompts.append(lengths[0])
            outputs.append(lengths[1])
            if len(prompts) == ROWS_AT_ONCE:
                yield Columns([0.0] * len(prompts), prompts, outputs)
                prompts, outputs = [], []
        yield Columns([0.0] * len(prompts), prompts, outputs)

    def _lengths(self, where: Where, value: object) -> tuple[int, int] | None:
        if not isinstance(value, dict):
            raise where.error("element", value, "is not a conversation", "write a list of {conversations: [...]}")
        turns = value.get("conversations", value.get("conversation", []))
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise where.error("conversations", turns, "is not a list of turns", "correct or delete the conversation")
        own_lengths = any(key in value for key in PROMPT_KEYS)
        if len(turns) < 2 and not own_lengths:
            return None
        options = self.options
        texts = [turn.get("value", turn.get("content")) for turn in turns[:2]] if len(turns) >= 2 else [None, None]
        prompt, output = lengths(where, value, options, texts)
        if options.sharegpt_filter:
            wanted = prompt >= 4 and output >= 4 and prompt <= 1024 and prompt + output <= 2048
            return (prompt, output) if wanted else None
        if prompt and output:
            return prompt, output
        if options.zero_tokens == "error":
            return where.tokens("prompt_tokens", prompt), where.tokens("output_tokens", output)
        return None if options.zero_tokens == "drop" else (prompt or 1, output or 1)
