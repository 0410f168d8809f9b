"""Text to token ids and back, for clients that send text."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpu_runtime.serve.chat_template import ChatTemplate, load_template
from gpu_runtime.serve.request import Chat, Refused
from sim.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TextOf = Callable[[int], str]
"""The text that one more token of an answer adds; may be empty until a character is complete."""
PRINTABLE = [chr(code) for code in range(33, 127)]


class Codec(Protocol):
    """How a server reads and writes text."""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text, and of what the tokenizer puts around it unless told not to."""
        ...

    def chat(self, chat: Chat) -> str:
        """The text of a chat; `Refused` where it has none."""
        ...

    def answer(self) -> TextOf:
        """What renders the tokens of one answer, in order."""
        ...


class ByteCodec:
    """No tokenizer: a text is its UTF-8 bytes modulo the vocabulary, and a token one printable ASCII character.

    Lengths are therefore exact and answers carry no meaning, which is what random weights say anyway.
    """

    def __init__(self, vocab_size: int, template: ChatTemplate | None = None) -> None:
        self._vocab_size, self._template = vocab_size, template

    def chat(self, chat: Chat) -> str:
        return chat.plain() if self._template is None else self._template.render(chat)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return [byte % self._vocab_size for byte in text.encode("utf-8", "replace")]

    def answer(self) -> TextOf:
        return lambda token: PRINTABLE[token % len(PRINTABLE)]


class FileCodec:
    """A `tokenizer.json` read by the package `tokenizers`, and the template of chats where it has one."""

    def __init__(self, tokenizer: "Tokenizer", template: ChatTemplate | None = None) -> None:
        self._tokenizer, self._template = tokenizer, template

    def chat(self, chat: Chat) -> str:
        if self._template is None:
            why = "the model's tokenizer has no chat template; serve with --chat-template FILE, or use /v1/completions"
            raise Refused(400, f"messages: {why}", param="messages")
        return self._template.render(chat)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def answer(self) -> TextOf:
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - optional

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""


def load_codec(folder: Path | None, vocab_size: int, chat_template: Path | None = None) -> Codec:
    """The tokenizer of a folder, or bytes where none is given; a chat template in place of the folder's own.

    Raises:
        UserError: the package or the file is missing, unreadable, or made for a larger vocabulary than the model's.
    """
    template = load_template(folder, chat_template)
    if folder is None:
        return ByteCodec(vocab_size, template)
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
    return FileCodec(tokenizer, template)
