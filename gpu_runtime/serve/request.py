"""What a client may ask for: bodies of `/v1/completions` and `/v1/chat/completions`, checked field by field."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from gpu_runtime.model.sampling import Sampling

COMPLETION_TOKENS = 16
"""Output tokens of a completion that names no `max_tokens` (OpenAI's default); a chat takes what the context leaves."""
MOST_STOPS = 16
SHOWN = 60
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "chat_template": (),
    "documents": ([],),
}
"""Fields that are not computed, and the values (beside null) that ask for nothing."""


class Refused(Exception):
    """An answer that is an error: status, OpenAI's error object, and headers."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers or {}


@dataclass(frozen=True)
class Chat:
    """The messages of a chat, and what is asked of its template.

    Attributes:
        messages: each with a `role` and a `content` that is text; what else they have is kept.
        add_generation_prompt: end with what begins an answer.
        continue_final_message: end within the last message, with which the answer goes on.
        options: more names that the template may read.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> str:
        """The messages one after the other, `role: content` a line: no model's own template."""
        lines = [f"{message['role']}: {message['content']}" for message in self.messages]
        if self.add_generation_prompt:
            lines.append("assistant:")
        return "\n".join(lines) + ("" if self.add_generation_prompt or self.continue_final_message else "\n")


@dataclass(frozen=True)
class Ask:
    """One request as its client states it.

    Attributes:
        prompts: each a text, or token ids; a chat has one. n: answers to each.
        special_tokens: whether a text gets those that the tokenizer puts around it.
        max_tokens: output tokens; None: the default.
        stop: token ids that end the answer, beside the model's own. stop_texts: strings that do.
        min_tokens: output tokens before which no stop token counts.
        sampling: how tokens are chosen, by the server's defaults where the client says nothing.
    """

    chat: bool
    model: str | None
    prompts: list[str | list[int]]
    n: int
    max_tokens: int | None
    stream: bool
    include_usage: bool
    ignore_eos: bool
    min_tokens: int
    return_token_ids: bool
    sampling: Sampling
    special_tokens: bool
    stop: frozenset[int]
    stop_texts: tuple[str, ...]

    def sampling_of(self, index: int) -> Sampling:
        """Of a choice, counted over all prompts: the answers to one prompt have seeds in a row, as in vLLM."""
        seed = self.sampling.seed
        return self.sampling if seed is None else msgspec.structs.replace(self.sampling, seed=seed + index % self.n)


SHARES = (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0))
"""Numbers of a request's sampling, and what they may be, as OpenAI and vLLM have it."""
SEED_LIMIT = 1 << 63


def read_ask(body: bytes, *, chat: bool, default: Sampling, text_of: Callable[[Chat], str]) -> Ask:
    """The request in a body; `Refused` (400) naming the field, its value and what to give instead.

    Args:
        body: JSON.
        chat: whether it has messages in place of a prompt.
        default: how tokens are chosen where it does not say.
        text_of: makes the prompt of a chat.
    """
    fields = _Fields.decoded(body)
    for name, neutral in NEUTRAL.items():
        fields.refuse_unless(name, neutral)
    stream = fields.boolean("stream")
    options = fields.mapping("stream_options")
    if options and not stream:
        raise _refused("stream_options", options, 'goes with "stream": true; leave it out')
    usage = options.get("include_usage", False)
    if not isinstance(usage, bool | None):
        raise _refused("stream_options.include_usage", usage, "is not true or false")
    if options.get("continuous_usage_stats"):
        raise _refused("stream_options.continuous_usage_stats", True, "is not supported; leave it out")
    max_tokens = fields.integer("max_tokens", least=1)
    if "max_completion_tokens" in fields:
        max_tokens = fields.integer("max_completion_tokens", least=1)
    min_tokens = fields.integer("min_tokens", least=0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise _refused("min_tokens", min_tokens, f"is more than max_tokens, {max_tokens}; lower it")
    return Ask(
        chat=chat,
        model=fields.text("model"),
        prompts=[text_of(_chat(fields))] if chat else _prompts(fields.get("prompt")),
        n=fields.integer("n", least=1) or 1,
        max_tokens=max_tokens,
        stream=stream,
        include_usage=bool(usage),
        ignore_eos=fields.boolean("ignore_eos"),
        min_tokens=min_tokens,
        return_token_ids=fields.boolean("return_token_ids"),
        sampling=sampling_of(fields.data, default),
        # A chat's template has them.
        special_tokens=fields.boolean("add_special_tokens", default=not chat),
        stop=frozenset(_ids("stop_token_ids", fields.get("stop_token_ids") or [])),
        stop_texts=_stop_texts(fields.get("stop")),
    )


def sampling_of(data: dict[str, Any], default: Sampling) -> Sampling:
    """How tokens are chosen by the fields of an object; `Refused` for a value that cannot be."""
    fields, given = _Fields(data), dict[str, Any]()
    for name, least, most in SHARES:
        if name in fields:
            given[name] = fields.number(name, least, most)
    for name, least in (("top_k", -1), ("seed", -SEED_LIMIT)):
        if name in fields:
            given[name] = fields.integer(name, least=least)
    if given.get("seed", 0) >= SEED_LIMIT:
        raise _refused("seed", given["seed"], f"is more than {SEED_LIMIT - 1}; lower it")
    return msgspec.structs.replace(default, **given)


class _Fields:
    """A JSON object whose values are asked for by type; null counts as absent."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = {name: value for name, value in data.items() if value is not None}

    @classmethod
    def decoded(cls, body: bytes) -> Self:
        """Those of a JSON body."""
        try:
            data = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Refused(400, f"the body is not JSON ({error}); send a JSON object") from None
        except RecursionError:
            raise Refused(400, "the body is nested too deeply; send a flat JSON object") from None
        if not isinstance(data, dict):
            raise Refused(400, f"the body is {_short(data)}, not a JSON object; send {{...}} with named fields")
        return cls(data)

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def get(self, name: str) -> Any:  # noqa: ANN401
        """The value as it is."""
        return self.data.get(name)

    def text(self, name: str) -> str | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, str):
            raise _refused(name, value, "is not text")
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            raise _refused(name, value, "is not true or false")
        return value

    def integer(self, name: str, *, least: int) -> int | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _refused(name, value, f"is not a whole number of at least {least}")
        return value

    def number(self, name: str, least: float, most: float) -> float:
        value = self.data[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refused(name, value, "is not a number")
        if not least <= value <= most:
            raise _refused(name, value, f"is not between {least:g} and {most:g}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.data.get(name, {})
        if not isinstance(value, dict):
            raise _refused(name, value, "is not an object; send {...}")
        return value

    def refuse_unless(self, name: str, neutral: tuple[Any, ...]) -> None:
        """Refuse a field that asks for what is not computed."""
        value = self.data.get(name)
        # True == 1 in Python; `"n": true` is no number all the same.
        if value is not None and not any(
            value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral
        ):
            raise _refused(name, value, "is not supported; leave it out")


def _prompts(value: Any) -> list[str | list[int]]:  # noqa: ANN401
    """One prompt, or a list of them."""
    if value is None:
        raise Refused(400, "prompt is missing; send text or a list of token ids", param="prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return [_prompt(f"prompt[{i}]", prompt) for i, prompt in enumerate(value)]
    return [_prompt("prompt", value)]


def _prompt(name: str, value: Any) -> str | list[int]:  # noqa: ANN401
    if not isinstance(value, str):
        value = _ids(name, value)
    if not value:
        raise _refused(name, value, "is empty; send at least one token")
    return value


def _stop_texts(value: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Strings at which an answer ends; an empty one ends nothing."""
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _refused("stop", value, "is neither text nor a list of texts")
    if len(texts) > MOST_STOPS:
        raise _refused("stop", value, f"holds {len(texts)} texts; send at most {MOST_STOPS}")
    return tuple(text for text in texts if text)


def _ids(name: str, value: Any) -> list[int]:  # noqa: ANN401
    if not isinstance(value, list):
        raise _refused(name, value, "is not a list of token ids")
    for i, token in enumerate(value):
        if type(token) is not int or token < 0:
            raise _refused(f"{name}[{i}]", token, "is not a token id; send whole numbers of at least 0")
    return value


def _chat(fields: _Fields) -> Chat:
    messages = _messages(fields.get("messages"))
    goes_on = fields.boolean("continue_final_message")
    begins = fields.boolean("add_generation_prompt", default=not goes_on)
    if goes_on and begins:
        raise _refused("continue_final_message", True, "does not go with add_generation_prompt; send one of them")
    return Chat(messages, begins, goes_on, fields.mapping("chat_template_kwargs"))


def _messages(value: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    if not isinstance(value, list) or not value:
        raise _refused("messages", value, 'is not a list of messages; send [{"role": "user", "content": "..."}]')
    found: list[dict[str, Any]] = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refused(f"messages[{i}]", message, 'is no message; send {"role": "user", "content": "..."}')
        role, content = message["role"], message.get("content")
        # An assistant that only called tools said nothing.
        said = "" if content is None and role == "assistant" else _content(content, f"messages[{i}].content")
        found.append({**message, "content": said})
    return found


def _content(value: Any, name: str) -> str:  # noqa: ANN401
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _refused(name, value, "is not text")
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _refused(f"{name}[{i}]", part, 'is no text; send {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in value)


def _refused(name: str, value: object, why: str) -> Refused:
    return Refused(400, f"{name}: {_short(value)} {why}", param=name)


def _short(value: object) -> str:
    # Values of megabytes are cut before they are written out.
    if isinstance(value, str | list):
        value = value[:SHOWN]
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
