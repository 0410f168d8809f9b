"""`RequestPrice`: seconds of the engine that a request still takes, by price and by prediction.

A sequence that decodes l more tokens from context c, m = c + l / 2 on average, takes

    l (F max((m / block + 1/2) / blocks, 1 / max_num_seqs, (k m + h) / (P - F)) + k m + h)

of the engine's time: its share, by blocks, by seat or by what fits an iteration of P seconds, of what an iteration
costs however small it is (F), and what it adds to the iteration (k a token of its context, h). P is the TPOT that is to
be met. A prompt of p tokens takes a p + b p^2, and its share of F where time limits the batch: P / (P - F) times that.
F, k, h, a and b are read off the deployment's cost model, whatever its form.

Lengths come from the predictor alone: a median that is exact (it is the lower bound, too) or a class's, which is
mistrusted when nearly spent; without one the mean of what the last outputs had left at that point. None is expected
to get more than the engine lets a context grow to.
"""

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate
from math import inf
from typing import Final

from sim.cost.model import CostModel
from sim.engine.limits import Limits
from sim.engine.sequence import Sequence

FEW_LEFT: Final = 16
MOST_MORE: Final = 64
"""With fewer than `FEW_LEFT` tokens left of a class's median, a quarter of those generated are expected, at least
`FEW_LEFT` and at most `MOST_MORE`."""
HISTORY: Final = 1000
UNKNOWN: Final = 256
"""Tokens of an output before any has ended."""
BATCH: Final = 64
PROMPTS: Final = (2048, 4096)
"""Where the cost model is asked: decodes beside one another, and prompts that fill the device."""


class Outlook:
    """What the class of a request follows from, at any time.

    Args:
        due_s: of its first token; of its last as its TPOT has it, once it has had one; -inf where the first was late.
        num_left: tokens expected before the last is due.
        prompt_s: what is to be computed before them, with a margin where the first token is due.
        work_s: price of all that is left.
        first_s: price of its prompt alone.
    """

    __slots__ = ("due_s", "first_s", "num_left", "prompt_s", "work_s")

    def __init__(self, due_s: float, num_left: float, prompt_s: float, work_s: float, first_s: float) -> None:
        self.due_s, self.num_left, self.prompt_s = due_s, num_left, prompt_s
        self.work_s, self.first_s = work_s, first_s


class LengthHistory:
    """Outputs that ended last, and what they had left at a point."""

    memoized = ("_sums",)

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._sorted: list[int] = []
        # Of the longest 0, 1, 2... of them; made anew when asked for.
        self._sums: list[int] = []

    def add(self, num_tokens: int) -> None:
        """An output of so many tokens ended."""
        if len(self._last) == HISTORY:
            del self._sorted[bisect_right(self._sorted, self._last.popleft()) - 1]
        self._last.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._sums = []

    def left_after(self, num_tokens: int) -> float:
        """Mean of what outputs longer than `num_tokens` had beyond them; a quarter more where none was longer."""
        if not self._sorted:
            return max(1.0, UNKNOWN - num_tokens)
        longer = len(self._sorted) - bisect_right(self._sorted, num_tokens)
        if not longer:
            return max(1.0, num_tokens / 4)
        if not self._sums:
            self._sums = list(accumulate(reversed(self._sorted), initial=0))
        return self._sums[longer] / longer - num_tokens


class RequestPrice:
    """Prices of what requests still need.

    Args:
        cost, limits: of the engine.
        longest: context at which it ends a request, tokens.
    """

    def __init__(self, cost: CostModel, limits: Limits, longest: float = inf) -> None:
        self.history = LengthHistory()
        self._longest = longest
        self._block_share = 1.0 / (limits.block_size * limits.num_gpu_blocks)
        self._half_block = 0.5 / limits.num_gpu_blocks
        self._seat_share = 1.0 / limits.max_num_seqs
        one_s = cost.decode_steps(1, 1)[0]
        context_s = max(0.0, cost.decode_steps(1, 1025)[0] - one_s) / 1024
        decode_s = max(0.0, cost.decode_steps(BATCH, BATCH)[0] - one_s) / (BATCH - 1)
        short, long = PROMPTS
        square_s = max(0.0, cost.prefill_s(long) / long - cost.prefill_s(short) / short) / (long - short)
        token_s = max(0.0, cost.prefill_s(short) / short - square_s * short)
        self._by_price = context_s, decode_s, max(0.0, one_s - decode_s), square_s, token_s
        self.correct(1.0)
        self._per_pace = 0.0
        """1 / (P - F), or 0 where the weights alone take longer than P: nothing helps then."""
        self._prompt_factor = 1.0
        self.beside = 1.0
        """What prompts take beside decodes, for each second of their price."""

    def correct(self, factor: float) -> None:
        """Everything takes `factor` times what the cost model says."""
        self.factor = factor
        self.context_s, self.decode_s, self.step_s, self.square_s, self.token_s = (
            factor * one_s for one_s in self._by_price
        )

    def keep_pace(self, iteration_s: float, *, is_limit: bool = False) -> None:
        """Iterations are to take so long at most (P); `is_limit`: that limits the batch, not blocks or seats."""
        self._per_pace = 1.0 / (iteration_s - self.step_s) if iteration_s > self.step_s else 0.0
        self._prompt_factor = 1.0 + self.step_s * self._per_pace if is_limit else 1.0

    def most_decodes(self, within_s: float, context: float, member_s: float = 0.0, prompt_s: float = 0.0) -> float:
        """How many of such contexts decode together in iterations of so many seconds; inf where weights alone do not.

        Each takes `member_s` at least, and `prompt_s` of prompts for its token.
        """
        room_s, share_s = within_s - self.step_s, max(member_s, self.context_s * context + self.decode_s) + prompt_s
        return room_s / share_s if room_s > 0.0 and share_s else inf

    def tokens_left(self, seq: Sequence, num_generated: int) -> float:
        """Output tokens that `seq`, with so many, is expected to get yet; at least 1."""
        median = seq.predicted_median_tokens
        left = float(median - num_generated)
        if not median:
            left = self.history.left_after(num_generated)
        elif seq.predicted_lower_tokens == median:
            left = max(1.0, left)
        elif left < FEW_LEFT:
            left = max(FEW_LEFT, min(num_generated / 4, MOST_MORE))
        room = self._longest - seq.request.prompt_tokens - num_generated
        return left if left <= room else max(1.0, room)

    def decodes_s(self, num_tokens: float, context: float) -> float:
        """What so many more tokens from that context on take."""
        mean = context + num_tokens / 2
        token_s = self.context_s * mean + self.decode_s
        # Of an iteration of a full batch, the largest: by blocks, by seat or by time.
        share, by_time = mean * self._block_share + self._half_block, self._per_pace * token_s
        if share < self._seat_share:
            share = self._seat_share
        if share < by_time:
            share = by_time
        return self.step_s * (num_tokens * share) + num_tokens * token_s

    def iterations_by_limit(self, num_tokens: float, context: float, prompt_s: float) -> tuple[float, float]:
        """Iterations of a full batch: by blocks or seats alone, and by time alone with a prompt of so many seconds."""
        mean = context + num_tokens / 2
        room = num_tokens * max(mean * self._block_share + self._half_block, self._seat_share)
        return room, self._per_pace * (num_tokens * (self.context_s * mean + self.decode_s) + prompt_s)

    def prefill_s(self, num_tokens: int) -> float:
        """What a prompt takes in batches that others share."""
        return num_tokens * (self.token_s + self.square_s * num_tokens)

    def prompt_work_s(self, prefill_s: float) -> float:
        """What a prompt of so many seconds costs."""
        return self.beside * self._prompt_factor * prefill_s
