"""Text to token ids and back, for clients that send text."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sim.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TextOf = Callable[[int], str]
"""The text that one more token of an answer adds; may be empty until a character is complete."""
PRINTABLE = [chr(code) for code in range(33, 127)]


class Codec(Protocol):
    """How a server reads and writes text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def answer(self) -> TextOf:
        """What renders the tokens of one answer, in order."""
        ...


class ByteCodec:
    """No tokenizer: a text is its UTF-8 bytes modulo the vocabulary, and a token one printable ASCII character.

    Lengths are therefore exact and answers carry no meaning, which is what random weights say anyway.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [byte % self._vocab_size for byte in text.encode("utf-8", "replace")]

    def answer(self) -> TextOf:
        return lambda token: PRINTABLE[token % len(PRINTABLE)]


class FileCodec:
    """A `tokenizer.json` read by the package `tokenizers`."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def answer(self) -> TextOf:
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - optional

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""


def load_codec(folder: Path | None, vocab_size: int) -> Codec:
    """The tokenizer of a folder, or bytes where none is given.

    Raises:
        UserError: the package or the file is missing, unreadable, or made for a larger vocabulary than the model's.
    """
    if folder is None:
        return ByteCodec(vocab_size)
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - optional
    except ImportError:
        raise UserError("--tokenizer needs the package tokenizers: pip install 'kvtwin[serve]'") from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"--tokenizer: {folder} holds no tokenizer.json: name the folder that does")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises nothing narrower.
        raise UserError(f"{path}: not a tokenizer ({error}): give a tokenizer.json") from error
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        raise UserError(f"{path}: has token {largest}, the model {vocab_size} tokens: give the model's own tokenizer")
    return FileCodec(tokenizer)
