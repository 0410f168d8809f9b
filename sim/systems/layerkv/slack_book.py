"""LayerKV's Eq. 1 and 2 over all that decode.

The slack of request i, with N_past and T_past counted from its first token and N_fut = max(1, lower bound - generated):

    A_i = tpot_slo (N_past + N_fut) - T_past - tpot_now N_fut                                                  (Eq. 1)

Tokens still expected shrink by one an iteration for members of the batch, and stand still for parked sequences.
"""

from math import inf
from operator import itemgetter
from typing import Final

from sim.engine.sequence import Sequence

WITNESSES: Final = 8
"""How many near-blocking requests are remembered from one look to the next."""
NEAR_S: Final = 2.0
"""So far beyond what would block, the slack is of those that are looked at again."""
RISE_S: Final = 2.0
"""And so far below what counts, of those that are late for good."""
CERTAIN_S: Final = 1e-7
"""Slack this close to a bound is looked at step by step: sums of floats differ by less."""


class Entry:
    """What Eq. 1 asks of a request: `base_s` less now and less the time of the tokens expected is its slack.

    `left` tokens are, less the batch's step where that counts them down (`stepping`).
    """

    __slots__ = ("base_s", "left", "stepping")

    def __init__(self) -> None:
        self.base_s = inf
        self.left = 1.0
        self.stepping = False


class SlackBook:
    """Slacks of the requests that have their first token and not yet their last."""

    # What was found at the last full look proves answers and changes none.
    memoized = ("_beyond_s", "_late_s", "_most_left", "_most_near", "_near", "_seen", "_witnesses")

    def __init__(self, tpot_slo_s: float, *, drop_irrecoverable: bool) -> None:
        self.tpot_slo_s = tpot_slo_s
        # Requests that are late whatever happens are left out of Eq. 2, if so asked.
        self.floor_s = 0.0 if drop_irrecoverable else -inf
        self._entry_of: dict[Sequence, Entry] = {}
        self._witnesses: list[Entry] = []
        self._near: dict[Entry, None] = {}
        """At the last full look, and those that changed since."""
        self._seen = 0.0, 0.0, 0
        """TPOT, time and step of that look."""
        self._most_near = 0
        """More than these are looked through once more."""
        self._most_left = 1.0
        """Most tokens expected then of one that was not near."""
        self._beyond_s = self._late_s = -inf
        """The least slack of those that had more than is near, and by how much all that had less did not count."""

    def update(self, seq: Sequence, *, decoding: bool) -> None:
        """Note where `seq` stands: in the batch (`decoding`) or parked. Call it whenever that changes."""
        entry = self._entry_of.get(seq)
        if entry is None:
            entry = self._entry_of[seq] = Entry()
        self._near[entry] = None
        lower = seq.predicted_lower_tokens
        entry.base_s = self.tpot_slo_s * (lower - 1) + seq.first_token_s
        entry.stepping = decoding
        # A member of the batch reaches its lower bound when the batch's step reaches this.
        entry.left = float(lower - seq.output_tokens + seq.finish_step if decoding else lower - seq.num_generated)

    def remove(self, seq: Sequence) -> None:
        """`seq` ended or lost its place."""
        entry = self._entry_of.pop(seq, None)
        if entry is not None:
            self._near.pop(entry, None)
            # It may be a witness; endless slack proves nothing.
            entry.base_s = inf

    def least_s(self, prefill_s: float, now_s: float, tpot_s: float, step: int) -> float:
        """Right side of Eq. 2, s: the least slack of all; infinite with none to defend.

        If it blocks prefills of `prefill_s`, the nearest to blocking are remembered as witnesses.

        Slack falls no faster than time passes, and rises by no more than the TPOT or its SLO a step, but for what a
        change of the TPOT makes of the tokens expected: those that are far off need no look.
        """
        seen_tpot_s, seen_s, seen_step = self._seen
        fallen_s = now_s - seen_s
        risen_s = (step - seen_step) * max(tpot_s, self.tpot_slo_s) - fallen_s
        dearer_s = (tpot_s - seen_tpot_s) * self._most_left
        if dearer_s > 0.0:
            fallen_s += dearer_s
        else:
            risen_s -= dearer_s
        entries = list(self._near)
        slacks_s = self._slacks_s(entries, now_s, tpot_s, step)
        least_s = self._least_s(slacks_s)
        is_unsure = risen_s > self._late_s - CERTAIN_S or least_s > self._beyond_s - fallen_s - CERTAIN_S
        if is_unsure or len(slacks_s) > self._most_near:
            entries = self._look(prefill_s, now_s, tpot_s, step)
            slacks_s = self._slacks_s(entries, now_s, tpot_s, step)
            least_s = self._least_s(slacks_s)
        self._witnesses = []
        if least_s <= prefill_s:
            by_slack = sorted(zip(slacks_s, entries, strict=True), key=itemgetter(0))
            self._witnesses = [entry for slack_s, entry in by_slack if slack_s >= self.floor_s][:WITNESSES]
        return least_s

    def _look(self, prefill_s: float, now_s: float, tpot_s: float, step: int) -> list[Entry]:
        """Note, and say, whose slack is near what blocks `prefill_s` or, if more, the least."""
        entries = list(self._entry_of.values())
        slacks_s = self._slacks_s(entries, now_s, tpot_s, step)
        most_s, low_s = max(prefill_s, self._least_s(slacks_s)) + NEAR_S, self.floor_s - RISE_S
        near: list[Entry] = []
        most_left, late_s, beyond_s = 1.0, -inf, inf
        for slack_s, entry in zip(slacks_s, entries):  # noqa: B905 - compiled, it makes no tuples so
            if low_s <= slack_s <= most_s:
                near.append(entry)
                continue
            left = entry.left - step if entry.stepping else entry.left
            if left > most_left:
                most_left = left
            if slack_s > most_s:
                if slack_s < beyond_s:
                    beyond_s = slack_s
            elif slack_s > late_s:
                late_s = slack_s
        self._near, self._most_near = dict.fromkeys(near), 2 * len(near) + WITNESSES
        self._seen, self._most_left, self._beyond_s = (tpot_s, now_s, step), most_left, beyond_s
        self._late_s = self.floor_s - late_s if late_s > -inf else inf
        return near

    def _least_s(self, slacks_s: list[float]) -> float:
        """The least that counts, s; infinite without any."""
        least_s, floor_s = inf, self.floor_s
        for slack_s in slacks_s:
            if floor_s <= slack_s < least_s:
                least_s = slack_s
        return least_s

    def _slacks_s(self, entries: list[Entry], now_s: float, tpot_s: float, step: int) -> list[float]:
        """Eq. 1 of each."""
        found: list[float] = []
        past_s, passed_s = tpot_s - self.tpot_slo_s, tpot_s * step
        for entry in entries:
            left = entry.left
            slack_s = entry.base_s - left * tpot_s
            if entry.stepping:
                slack_s += passed_s
                left -= step
            if left < 1.0:
                # Past its lower bound a request still expects one token, and every token it has earned it time.
                slack_s += past_s * (left - 1.0)
            found.append(slack_s - now_s)
        return found

    def is_blocked(self, prefill_s: float, now_s: float, tpot_s: float, step: int) -> bool:
        """Whether one of the requests that were nearest to blocking at the last full look proves Eq. 2 violated.

        True is exact; False proves nothing, the full look has to decide.
        """
        for entry in self._witnesses:
            left = entry.left - step if entry.stepping else entry.left
            future = left if left > 1.0 else 1.0
            slack_s = entry.base_s + self.tpot_slo_s * (future - left) - tpot_s * future - now_s
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
        for entry in self._witnesses:
            stepping = entry.stepping
            left = entry.left - step if stepping else entry.left
            # Past its lower bound a request earns time with every token: look again at each.
            limit = min(most, int(left) - 1) if stepping else most
            if left < 1.0 or limit <= best:
                continue
            base_s = entry.base_s - now_s

            def slack_s(k: int, base_s: float = base_s, left: float = left, stepping: bool = stepping) -> float:
                gone_s = first_s * k + slope_s * (k * (k - 1) / 2)
                return base_s - gone_s - (first_s + slope_s * (k - 1)) * (left - k if stepping else left)

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
