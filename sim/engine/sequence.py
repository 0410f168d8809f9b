"""`Sequence`: how far one request has come, and what it holds."""

from enum import Enum

from traces.request import Request


class Status(Enum):
    """Where a sequence stands (vLLM's words; PARKED: prefilled, not decoding, its KV held or on its way).

    `TRANSITIONS` says which may follow which.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PARKED = "parked"
    PROMOTING = "promoting"
    HANDED_OVER = "handed over"
    FINISHED = "finished"
    IGNORED = "ignored"


# For the hot path, as those of `sim.engine.changes`.
WAITING, RUNNING, PARKED, PROMOTING = Status.WAITING, Status.RUNNING, Status.PARKED, Status.PROMOTING
FINISHED, IGNORED = Status.FINISHED, Status.IGNORED

TRANSITIONS: dict[Status, frozenset[Status]] = {
    # Admitted, also to finish with its first token; or refused for ever.
    Status.WAITING: frozenset({Status.RUNNING, Status.IGNORED}),
    # Preempted to be computed again, swapped out, parked, or at its end.
    Status.RUNNING: frozenset({Status.WAITING, Status.SWAPPED, Status.PARKED, Status.FINISHED, Status.IGNORED}),
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


class Sequence:
    """Progress of one request.

    `num_tokens` is the context length, prompt and generated tokens together (vLLM's `get_len()`). While the sequence is
    in a `DecodeBatch` its length is `batch_offset + batch.step`, so that a decode iteration touches no sequence;
    `num_tokens`, `num_generated` and `num_blocks` are brought up to date when it leaves.
    `num_cached_tokens` are the prompt tokens that were hit when it was first admitted (vLLM's name).
    Times are seconds on the run's clock; -1.0 means not yet.
    """

    __slots__ = (
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

    def reset_for_recompute(self) -> None:
        """Forget the KV cache: the next prefill covers prompt and generated tokens (vLLM 0.5.5)."""
        self.num_computed = 0
        self.num_blocks = 0
        self.prefilling = True
        self.status = WAITING
        self.num_preemptions += 1
