"""`Request`: what a trace says of one call to the server, the noun every other folder starts from."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

from traces.slos import SLOs


class ToolCall(NamedTuple):
    """Generation stops after `after_tokens` output tokens, while a tool works for `duration_s`; then it goes on behind
    `returned_tokens` more tokens of context, the tool's answer."""

    after_tokens: int
    duration_s: float
    returned_tokens: int


class Image(NamedTuple):
    """An image of a prompt: `num_tokens` of its tokens, from the one at place `offset` on, are the encoder's output.

    Equal `image_id` and length, equal image.
    """

    offset: int
    num_tokens: int
    image_id: int


class Request(NamedTuple):
    """One request of a trace (immutable).

    `request_id` is its position in the trace, `arrival_s` seconds after the trace's start, lengths are in tokens.
    `hash_ids` name the prompt's blocks of `hash_block_tokens` tokens each; empty where the trace has none. Equal ids,
    equal content; in most traces an id names all that stands before its block, too. The id of a partly filled last
    block names the whole block, generated tokens in it included, and `output_hash_ids` the blocks after it.
    `session_id` joins the turns of one conversation; empty where the trace has
    none. A lower `priority` is more urgent, as in vLLM. `calls` are in order, each after more output tokens than
    the one before, and none after the last token. `slos` are its own; None: it has those of `--goodput`.
    `acceptance_rate` is the chance that a token drafted for it is accepted where those before it are; None: the
    policy's. `images` are in order and apart, and among the tokens of the prompt. `lora` is the name of its adapter;
    empty: none.
    """

    request_id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    session_id: str = ""
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 0
    output_hash_ids: tuple[int, ...] = ()
    priority: int = 0
    calls: tuple[ToolCall, ...] = ()
    slos: SLOs | None = None
    acceptance_rate: float | None = None
    images: tuple[Image, ...] = ()
    lora: str = ""

    @property
    def most_tokens(self) -> int:
        """Context length at its end: prompt, answers of tools, output."""
        tokens = self.prompt_tokens + self.output_tokens
        return tokens + sum(call.returned_tokens for call in self.calls) if self.calls else tokens


as_request = cast(Callable[[tuple[object, ...]], Request], partial(tuple.__new__, Request))
"""`Request(*row)` in a third of its time: a named tuple's own constructor is a Python function, the tuple's is not."""
