"""`Sequence`: how far one request has come, and what it holds."""

from enum import Enum
from typing import Final

from traces.request import Request, ToolCall


class Status(Enum):
    """Where a sequence stands (vLLM's words; PARKED: prefilled, not decoding, its KV held or on its way;
    CALLING: a tool works for it).

    `TRANSITIONS` says which may follow which.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PARKED = "parked"
    PROMOTING = "promoting"
    CALLING = "calling"
    HANDED_OVER = "handed over"
    FINISHED = "finished"
    IGNORED = "ignored"


# For the hot path, as those of `sim.engine.changes`.
WAITING: Final = Status.WAITING
RUNNING: Final = Status.RUNNING
PARKED: Final = Status.PARKED
PROMOTING: Final = Status.PROMOTING
FINISHED: Final = Status.FINISHED
IGNORED: Final = Status.IGNORED

TRANSITIONS: dict[Status, frozenset[Status]] = {
    # Admitted, also to finish with its first token; or refused for ever.
    # Or preempted with the token in flight with which it calls a tool.
    Status.WAITING: frozenset({Status.RUNNING, Status.IGNORED, Status.CALLING}),
    # Preempted to be computed again, swapped out, parked, with a tool, or at its end.
    Status.RUNNING: frozenset({Status.WAITING, Status.SWAPPED, Status.PARKED, Status.FINISHED, Status.IGNORED})
    | {Status.CALLING},
    # The tool has answered.
    Status.CALLING: frozenset({Status.RUNNING, Status.PROMOTING, Status.PARKED, Status.WAITING, Status.IGNORED}),
    # Back, on its way back, computed again, or grown beyond the pool.
    Status.SWAPPED: frozenset({Status.RUNNING, Status.PROMOTING, Status.WAITING, Status.IGNORED}),
    Status.PARKED: frozenset({Status.RUNNING, Status.PROMOTING, Status.SWAPPED, Status.WAITING, Status.IGNORED})
    | {Status.HANDED_OVER},
    # On its way back: nothing but arriving, or losing everything.
    Status.PROMOTING: frozenset({Status.RUNNING, Status.PARKED}),
    # Another engine goes on with it.
    Status.HANDED_OVER: frozenset(),
    Status.FINISHED: frozenset(),
    Status.IGNORED: frozenset(),
}
"""Which status may follow which. `kvtwin.testing` holds every preset to it."""


SLOTS = (
    "batch_offset",
    "error",
    "finish_s",
    "finish_step",
    "first_scheduled_s",
    "first_token_s",
    "last_token_s",
    "num_blocks",
    "num_cached_tokens",
    "num_computed",
    "num_generated",
    "num_preemptions",
    "num_tokens",
    "output_tokens",
    "predicted_lower_tokens",
    "predicted_median_tokens",
    "prefilling",
    "request",
    "status",
)
"""What a sequence keeps; a copy of one has the same."""


class Sequence:
    """Progress of one request.

    `num_tokens` is the context length, prompt and generated tokens together (vLLM's `get_len()`). While the sequence is
    in a `DecodeBatch` its length is `batch_offset + batch.step`, so that a decode iteration touches no sequence;
    `num_tokens`, `num_generated` and `num_blocks` are brought up to date when it leaves.
    `num_cached_tokens` are the prompt tokens that were hit when it was first admitted (vLLM's name).
    Where it calls tools, `output_tokens` is how many it has had when it next calls or ends (`CallingSequence`).
    Times are seconds on the run's clock; -1.0 means not yet.
    """

    __slots__ = SLOTS

    calls: tuple[ToolCall, ...] = ()
    """Of tools, those to come; the first may be under way."""
    tool_s: float = 0.0
    """For how long tools have worked for it, s."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output_tokens = request.output_tokens
        self.num_tokens = request.prompt_tokens
        self.num_generated = 0
        self.num_computed = 0
        self.num_blocks = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.prefilling = True
        self.status = WAITING
        self.first_scheduled_s = -1.0
        self.first_token_s = -1.0
        self.last_token_s = -1.0
        self.finish_s = -1.0
        self.batch_offset = 0
        self.finish_step = 0
        self.error = ""
        self.predicted_lower_tokens = 1
        self.predicted_median_tokens = 0

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id} {self.status.value} {self.num_tokens} tokens>"

    @property
    def most_tokens(self) -> int:
        """Context length when it next calls a tool or ends; of members of the batch, too."""
        return self.num_tokens - self.num_generated + self.output_tokens

    def drop_calls(self) -> None:
        """It calls no more tools, and ends with its stretch."""

    def reset_for_recompute(self) -> None:
        """Forget the KV cache: the next prefill covers prompt and generated tokens (vLLM 0.5.5)."""
        self.num_computed = 0
        self.num_blocks = 0
        self.prefilling = True
        self.status = WAITING
        self.num_preemptions += 1


class CallingSequence(Sequence):
    """A sequence that calls tools: it is generated in stretches, and ends with the last."""

    __slots__ = ("calls", "tool_s")

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.calls = request.calls
        self.tool_s = 0.0
        self.output_tokens = self.calls[0].after_tokens

    def begin_call(self) -> ToolCall:
        """The call for which its stretch has ended; from now on it ends with the next."""
        call, self.calls = self.calls[0], self.calls[1:]
        self.output_tokens = self.calls[0].after_tokens if self.calls else self.request.output_tokens
        return call

    def drop_calls(self) -> None:
        self.calls = ()

    def end_call(self, call: ToolCall) -> None:
        """The tool has answered. What comes next is waited for from here on: the tool's time is not the engine's."""
        self.tool_s += call.duration_s
        self.last_token_s += call.duration_s
