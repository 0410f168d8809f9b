"""`TokenTimes`: when tokens really came, of iterations that the scheduler counts before they end.

Scheduled ahead, an iteration is counted when it is launched: its end is not known yet. The scheduler is told a
time all the same; what follows of it for people (first tokens, gaps, ends) is kept here in its place.
"""

from collections import Counter
from collections.abc import Iterable

from sim.engine.itl import GapCollector
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence, Status


class TokenTimes:
    """Notes gaps between tokens, and their times where they are asked for, in the scheduler's place."""

    def __init__(self, scheduler: Scheduler) -> None:
        batch = scheduler.batch
        self._gaps = scheduler.gaps
        # What the scheduler makes of times that are not known yet is not read.
        scheduler.gaps = batch.gaps = GapCollector()
        self._log, batch.token_log = batch.token_log, None
        self._last_s: dict[Sequence, float] = {}

    def came(self, sampled: Iterable[Sequence], last: Iterable[Sequence], end_s: float) -> None:
        """A token of each of `sampled` came at `end_s`, the last ones of `last`."""
        before: Counter[float] = Counter()
        for seq in sampled:
            if seq.status in (Status.FINISHED, Status.IGNORED):
                # It had ended before: the token is dropped.
                continue
            last_s = self._last_s.get(seq)
            if last_s is None:
                seq.first_token_s = end_s
            else:
                before[last_s] += 1
            self._last_s[seq] = end_s
            if self._log is not None:
                self._log.setdefault(seq.request.request_id, []).append(end_s)
        for last_s, count in before.items():
            self._gaps.add(end_s - last_s, 0.0, 1, count)
        for seq in last:
            seq.last_token_s = end_s

    def forget(self, seq: Sequence) -> None:
        """It has ended."""
        self._last_s.pop(seq, None)
