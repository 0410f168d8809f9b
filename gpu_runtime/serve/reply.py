"""What a client gets: OpenAI's objects for completions and chats, whole or as server-sent events."""

from collections.abc import Sequence
from time import time
from typing import Any

import msgspec

from gpu_runtime.serve.choice import Choice
from gpu_runtime.serve.request import Ask, Refused

DONE = b"data: [DONE]\n\n"
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

encode = msgspec.json.encode


def error_object(refused: Refused) -> dict[str, Any]:
    """OpenAI's error object."""
    status = refused.status
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": status}}


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


class Reply:
    """The answer to one request, as whole or chunk by chunk.

    Args:
        ask: what the client wants.
        model: the name it knows the model by.
        choices: `ask.n` for each prompt, one prompt after the other.
    """

    def __init__(self, ask: Ask, model: str, choices: Sequence[Choice]) -> None:
        self.ask, self.choices = ask, choices
        kind = ("chat.completion", "text_completion")[not ask.chat]
        self._head: dict[str, Any] = {
            # The `request_id` of the first of them in the run's result.
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{choices[0].ticket.request.request_id}",
            "object": kind + ".chunk" if ask.chat and ask.stream else kind,
            "created": int(time()),
            "model": model,
        }
        # Chunks differ in their text alone: what stands before and after it is encoded once.
        before = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":%d,'
        self._before = [before % index for index in range(len(choices))]
        self._after = b',"logprobs":null,"finish_reason":null'

    def chunk(self, index: int, text: str, token: int) -> bytes:
        """One token more of a choice."""
        first = len(self.choices[index].tokens) == 1
        before, after = self._before[index], self._after
        if self.ask.return_token_ids:
            after += b',"token_ids":[%d]' % token
        if self.ask.chat:
            role = b'"role":"assistant",' if first else b""
            return before + b'"delta":{' + role + b'"content":' + encode(text) + b"}" + after + b"}]}\n\n"
        return before + b'"text":' + encode(text) + after + b"}]}\n\n"

    def end(self, index: int, text: str) -> bytes:
        """What follows the last token of a choice, with text that was kept back."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": self.choices[index].reason}
        choice |= {"delta": {"content": text} if text else {}} if self.ask.chat else {"text": text}
        return event({**self._head, "choices": [choice]})

    def end_all(self) -> bytes:
        """What follows the last choice."""
        usage = event({**self._head, "choices": [], "usage": self._usage()}) if self.ask.include_usage else b""
        return usage + DONE

    def whole(self, texts: Sequence[str]) -> dict[str, Any]:
        """Everything at once, given each choice's text."""
        choices: list[dict[str, Any]] = []
        for index, (found, text) in enumerate(zip(self.choices, texts, strict=True)):
            choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": found.reason}
            choice |= {"message": {"role": "assistant", "content": text}} if self.ask.chat else {"text": text}
            if self.ask.return_token_ids:
                choice |= {"token_ids": found.tokens, "prompt_token_ids": found.ticket.prompt}
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(choice.ticket.prompt) for choice in self.choices[:: self.ask.n])
        output = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
