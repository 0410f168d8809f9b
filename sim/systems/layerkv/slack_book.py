"""LayerKV's Eq. 1 and 2 over all that decode, as arrays: exact, in a few vector operations.

The slack of request i, with N_past and T_past counted from its first token and N_fut = max(1, lower bound - generated):

    A_i = tpot_slo (N_past + N_fut) - T_past - tpot_now N_fut                                                  (Eq. 1)

Tokens still expected shrink by one an iteration for members of the batch, and stand still for parked sequences.
"""

from math import inf

import numpy as np

from sim.engine.sequence import Sequence

WITNESSES = 8
"""How many near-blocking requests are remembered from one full look to the next."""
WITNESS_WINDOW_S = 2.0
CERTAIN_S = 1e-7
"""Slack this close to a bound is looked at step by step: sums of floats differ by less."""


class SlackBook:
    """Slacks of the requests that have their first token and not yet their last."""

    # Witnesses prove an answer and change none.
    memoized = ("_due_s", "_tpot_s", "_witnesses")

    def __init__(self, tpot_slo_s: float, *, drop_irrecoverable: bool, lengths_known: bool = False) -> None:
        """`lengths_known`: lower bounds are the lengths themselves, which no sequence outlives."""
        self.tpot_slo_s = tpot_slo_s
        self.lengths_known = lengths_known
        # Requests that are late whatever happens are left out of Eq. 2, if so asked.
        self.drop_irrecoverable = drop_irrecoverable
        self.floor_s = 0.0 if drop_irrecoverable else -inf
        self._capacity = 256
        self._size = 0
        self._free: list[int] = []
        self._slots: dict[Sequence, int] = {}
        self._base_s = np.full(self._capacity, inf)
        self._left = np.ones(self._capacity)
        self._stepping = np.zeros(self._capacity)
        # `base - tpot * left` of all at the TPOT asked for last: most iterations ask for the same again.
        self._due_s = np.full(self._capacity, inf)
        self._tpot_s = 0.0
        self._witnesses: list[int] = []

    def update(self, seq: Sequence, *, decoding: bool) -> None:
        """Note where `seq` stands: in the batch (`decoding`) or parked. Call it whenever that changes."""
        slot = self._slots.get(seq, -1)
        if slot < 0:
            slot = self._slots[seq] = self._free.pop() if self._free else self._grow()
        lower = seq.predicted_lower_tokens
        self._base_s[slot] = base_s = self.tpot_slo_s * (lower - 1) + seq.first_token_s
        self._stepping[slot] = decoding
        # A member of the batch reaches its lower bound when the batch's step reaches this.
        left = lower - seq.output_tokens + seq.finish_step if decoding else lower - seq.num_generated
        self._left[slot] = left
        self._due_s[slot] = base_s - self._tpot_s * left

    def remove(self, seq: Sequence) -> None:
        """`seq` ended or lost its place."""
        slot = self._slots.pop(seq, -1)
        if slot >= 0:
            self._base_s[slot] = self._due_s[slot] = inf
            self._left[slot] = 1.0
            self._stepping[slot] = 0.0
            self._free.append(slot)

    def _grow(self) -> int:
        slot = self._size
        self._size += 1
        if self._size > self._capacity:
            self._base_s = np.concatenate([self._base_s, np.full(self._capacity, inf)])
            self._left = np.concatenate([self._left, np.ones(self._capacity)])
            self._stepping = np.concatenate([self._stepping, np.zeros(self._capacity)])
            self._due_s = np.concatenate([self._due_s, np.full(self._capacity, inf)])
            self._capacity *= 2
        return slot

    def least_s(self, prefill_s: float, now_s: float, tpot_s: float, step: int) -> float:
        """Right side of Eq. 2, s: the least slack of all; infinite with none to defend.

        If it blocks prefills of `prefill_s`, the nearest to blocking are remembered as witnesses.
        """
        # Slots without a sequence are infinitely slack.
        if tpot_s != self._tpot_s:
            self._tpot_s = tpot_s
            self._due_s = self._base_s - self._left * tpot_s
        slack = self._stepping * (tpot_s * step)
        slack += self._due_s
        if not self.lengths_known:
            left = self._left - self._stepping * step
            if np.minimum.reduce(left) < 1.0:
                # Past its lower bound a request still expects one token, and every token it has earned it time.
                slack += (tpot_s - self.tpot_slo_s) * np.minimum(left - 1.0, 0.0)
        slack -= now_s
        # Read as integers, negative floats are greater than all others: this minimum leaves them out in one pass.
        least_s = slack.item((slack.view(np.uint64) if self.drop_irrecoverable else slack).argmin())
        if least_s < 0.0 and self.drop_irrecoverable:
            return inf
        if least_s <= prefill_s:
            near = ((slack >= self.floor_s) & (slack <= prefill_s + WITNESS_WINDOW_S)).nonzero()[0]
            self._witnesses = near[slack[near].argsort()][:WITNESSES].tolist()
        else:
            self._witnesses.clear()
        return least_s

    def is_blocked(self, prefill_s: float, now_s: float, tpot_s: float, step: int) -> bool:
        """Whether one of the requests that were nearest to blocking at the last full look proves Eq. 2 violated.

        True is exact; False proves nothing, the full look has to decide.
        """
        for slot in self._witnesses:
            left = self._left.item(slot) - self._stepping.item(slot) * step
            future = left if left > 1.0 else 1.0
            slack_s = self._base_s.item(slot) + self.tpot_slo_s * (future - left) - tpot_s * future - now_s
            if self.floor_s <= slack_s <= prefill_s:
                return True
        return False

    def blocked_steps(
        self, prefill_s: float, now_s: float, step: int, first_s: float, slope_s: float, most: int
    ) -> int:
        """After how many decode iterations, 0 to `most`, some witness is sure to block prefills of `prefill_s` still.

        Iterations last first_s, first_s + slope_s ... and each sets the TPOT of its end. With `left` tokens expected
        (falling by one an iteration in the batch, constant elsewhere) the slack after k iterations is

            base - now - k first - slope k (k-1) / 2 - (first + slope (k-1)) left(k)

        which falls with k: it blocks from the first iteration on until it is so late that it no longer counts.
        """
        best = 0
        for slot in self._witnesses:
            stepping = self._stepping.item(slot)
            left = self._left.item(slot) - stepping * step
            # Past its lower bound a request earns time with every token: look again at each.
            limit = min(most, int(left) - 1) if stepping else most
            if left < 1.0 or limit <= best:
                continue
            base_s = self._base_s.item(slot) - now_s

            def slack_s(k: int, base_s: float = base_s, left: float = left, stepping: float = stepping) -> float:
                gone_s = first_s * k + slope_s * (k * (k - 1) / 2)
                return base_s - gone_s - (first_s + slope_s * (k - 1)) * (left - stepping * k)

            if slack_s(1) > prefill_s - CERTAIN_S or slack_s(best + 1) < self.floor_s + CERTAIN_S:
                continue
            low, high = best + 1, limit
            while low < high:
                middle = (low + high + 1) // 2
                if slack_s(middle) >= self.floor_s + CERTAIN_S:
                    low = middle
                else:
                    high = middle - 1
            best = low
        return best
