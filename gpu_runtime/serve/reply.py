"""What a client gets: OpenAI's objects for completions and chats, whole or as server-sent events."""

from time import time
from typing import Any

import msgspec

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
        number: of the request; the `request_id` of the run's result.
        prompt: token ids.
    """

    def __init__(self, ask: Ask, model: str, number: int, prompt: list[int]) -> None:
        self.ask, self._prompt = ask, prompt
        self._tokens: list[int] = []
        self._texts: list[str] = []
        kind = ("chat.completion", "text_completion")[not ask.chat]
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{number}",
            "object": kind + ".chunk" if ask.chat and ask.stream else kind,
            "created": int(time()),
            "model": model,
        }
        # Chunks differ in their text alone: what stands before and after it is encoded once.
        self._before = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":0,'
        self._after = b',"logprobs":null,"finish_reason":null'

    def chunk(self, text: str, token: int) -> bytes:
        """One token."""
        first = not self._tokens
        self._tokens.append(token)
        after = self._after
        if self.ask.return_token_ids:
            after += b',"token_ids":[%d]' % token
        if self.ask.chat:
            role = b'"role":"assistant",' if first else b""
            return self._before + b'"delta":{' + role + b'"content":' + encode(text) + b"}" + after + b"}]}\n\n"
        return self._before + b'"text":' + encode(text) + after + b"}]}\n\n"

    def end(self, reason: str) -> bytes:
        """What follows the last token."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        choice |= {"delta": {}} if self.ask.chat else {"text": ""}
        last = event({**self._head, "choices": [choice]})
        if self.ask.include_usage:
            last += event({**self._head, "choices": [], "usage": self._usage()})
        return last + DONE

    def add(self, text: str, token: int) -> None:
        """Keep one token for `whole`."""
        self._tokens.append(token)
        self._texts.append(text)

    def whole(self, reason: str) -> dict[str, Any]:
        """Everything at once."""
        text = "".join(self._texts)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": text}} if self.ask.chat else {"text": text}
        if self.ask.return_token_ids:
            choice |= {"token_ids": self._tokens, "prompt_token_ids": self._prompt}
        return {**self._head, "choices": [choice], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        prompt, output = len(self._prompt), len(self._tokens)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
