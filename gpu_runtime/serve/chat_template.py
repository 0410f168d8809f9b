"""Chats as a model was trained to read them: by its tokenizer's Jinja template, rendered as transformers renders it.

Templates are a checkpoint's, and may come from anyone: they run in Jinja's sandbox, which shows them data and no code.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from gpu_runtime.serve.request import Chat, Refused
from sim.errors import UserError
from sim.specs.json_file import read_json_object

IN_TOKENIZER, ALONE = "tokenizer_config.json", "chat_template.jinja"
DEFAULT = "default"
"""Of several named templates, the one for chats without tools."""


class ChatTemplate:
    """A template that has been read.

    Args:
        source: Jinja.
        path: where it stands, for messages.
        tokens: what templates call bos_token, eos_token and the like.
    """

    def __init__(self, source: str, path: Path, tokens: dict[str, str]) -> None:
        """UserError where it is no template, or Jinja is not installed."""
        try:
            import jinja2  # noqa: PLC0415 - optional
        except ImportError:
            raise UserError(f"{path}: needs the package jinja2: pip install 'kvtwin[serve]'") from None
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{path}: line {error.lineno}: {error.message}: correct the chat template") from error
        self._tokens = tokens

    def render(self, chat: Chat) -> str:
        """The text of a chat; `Refused` (400) where the template does not take it."""
        try:
            text = self._template.render(
                **self._tokens | chat.options, messages=chat.messages, add_generation_prompt=chat.add_generation_prompt
            )
        except Exception as error:  # Whatever a template does with what a client sends.
            why = f"the model's chat template does not take them ({str(error) or type(error).__name__}); send others"
            raise Refused(400, f"messages: {why[:200]}", param="messages") from error
        return _until_last(text, chat) if chat.continue_final_message else text


def _until_last(text: str, chat: Chat) -> str:
    """The text up to the end of the last message, which the answer goes on with."""
    said = chat.messages[-1]["content"].strip()
    place = text.rfind(said)
    if place < 0:
        raise Refused(
            400,
            "continue_final_message: the model's chat template changes the last message; leave it out",
            param="continue_final_message",
        )
    return text[: place + len(said)]


def load_template(folder: Path | None, given: Path | None) -> ChatTemplate | None:
    """The template of a file, else of a tokenizer's folder; None where there is none.

    Raises:
        UserError: what is there is unreadable or no template.
    """
    config = (folder or Path()) / IN_TOKENIZER
    fields = read_json_object(config) if folder is not None and config.is_file() else {}
    tokens = {name: text for name, value in fields.items() if (text := _token(name, value)) is not None}
    alone = (folder or Path()) / ALONE
    if given is not None or (folder is not None and alone.is_file()):
        path = given or alone
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), path, tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read as a chat template ({error}): give a Jinja file") from error
    source = fields.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get(DEFAULT)
        if source is None:
            raise UserError(f"{config}: chat_template names no {DEFAULT!r}: give --chat-template FILE")
    if source is None:
        return None
    if not isinstance(source, str):
        raise UserError(f"{config}: chat_template is neither text nor a list of named texts: correct it")
    return ChatTemplate(source, config, tokens)


def _token(name: str, value: Any) -> str | None:  # noqa: ANN401
    """A special token of `tokenizer_config.json`, which is text, or an object with the text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if name.endswith("_token") and isinstance(value, str) else None


def _environment() -> Any:  # noqa: ANN401 - jinja2 is optional
    """As transformers' (`utils/chat_template_utils.py`)."""
    import jinja2.ext  # noqa: PLC0415 - optional
    import jinja2.sandbox  # noqa: PLC0415

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what an assistant said, for training: here it is what stands in it."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's

        def parse(self, parser: Any) -> Any:  # noqa: ANN401
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
