"""`Prospects`: class, rank and laxity of all sequences that have had their first token, at once.

`Triage` says the same of one sequence. Which to park is asked several times a second of hundreds, so that here they are
rows of a table, and the formulas go over its columns.
"""

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engine.sequence import Sequence
from sim.systems.adaptive.triage import DEFERRED, FOREVER_S, HOPELESS, KEPT, TIE_S, Triage

Floats = NDArray[np.float64]
NUM_COLUMNS = 9
STATE, GENERATED, PROMPT, MEDIAN, IS_EXACT, FIRST_S, ARRIVAL_S, NUMBER, TPOT_S = range(NUM_COLUMNS)
"""GENERATED: of those that decode, less the batch's step. FIRST_S: when the first token came, -inf if it was late.
TPOT_S: that it is to meet."""
DECODES, LEAVING, AWAY, RETURNING = range(4)
"""States: in the batch, on its way to the host, there, on its way back."""


class Judged(NamedTuple):
    """Of every row: its class, its price or what it comes before, s, how long it could stand still, s."""

    kind: NDArray[np.int64]
    rank_s: Floats
    laxity_s: Floats
    arrival_s: Floats
    number: Floats
    """Request id."""


class Prospects:
    """Rows for sequences that decode and for those that are parked, in no order."""

    def __init__(self, order: Triage) -> None:
        self.order = order
        self.seqs: list[Sequence] = []
        self.row: dict[Sequence, int] = {}
        self.columns: Floats = np.zeros((NUM_COLUMNS, 64))

    def decodes(self, seq: Sequence) -> None:
        """`seq` is in the batch."""
        row = self.row.get(seq)
        if row is None:
            row = self.row[seq] = len(self.seqs)
            self.seqs.append(seq)
            if row == self.columns.shape[1]:
                self.columns = np.concatenate((self.columns, np.zeros_like(self.columns)), axis=1)
        request, median = seq.request, seq.predicted_median_tokens
        late = seq.first_token_s > request.arrival_s + self.order.ttft_of(request) + TIE_S
        self.columns[:, row] = (
            DECODES, seq.num_generated - self.order.batch.step, request.prompt_tokens, median,
            median == seq.predicted_lower_tokens, -inf if late else seq.first_token_s, request.arrival_s,
            request.request_id, self.order.tpot_of(request),
        )  # fmt: skip

    def stands(self, seq: Sequence, state: int) -> None:
        """`seq` is in no batch, and where its KV is or goes."""
        self.columns[:PROMPT, self.row[seq]] = state, seq.num_generated

    def moved(self, seq: Sequence) -> None:
        """`seq` has a token more than the batch's step says."""
        self.columns[GENERATED, self.row[seq]] += 1.0

    def left(self, seq: Sequence) -> None:
        """`seq` has no KV any more."""
        row = self.row.pop(seq, None)
        if row is None:
            return
        last = self.seqs.pop()
        if last is not seq:
            self.seqs[row], self.row[last] = last, row
            self.columns[:, row] = self.columns[:, len(self.seqs)]

    def rows(self, *states: int) -> NDArray[np.int64]:
        """Of sequences in one of `states`."""
        state = self.columns[STATE, : len(self.seqs)]
        wanted = state == states[0]
        for one in states[1:]:
            wanted |= state == one
        return wanted.nonzero()[0]

    def judged(self, iteration_s: float) -> Judged:
        """All rows, now."""
        order = self.order
        now_s, price = order.scheduler.now_s, order.price
        columns = self.columns[:, : len(self.seqs)]
        state, base, prompt, median, is_exact, first_s, arrival_s, number, tpot_s = columns
        generated = base + (state == DECODES) * order.batch.step
        context = prompt + generated
        left = price.all_tokens_left(median, is_exact != 0.0, generated, context)
        rank_s = price.decodes_s(left, context, np.maximum)
        laxity_s = first_s + tpot_s * (generated + left - 1) - now_s - left * iteration_s
        kind = (rank_s > order.price_limit_s) * DEFERRED
        kind[laxity_s < 0.0] = HOPELESS
        if order.patience_s:
            impatient = now_s >= arrival_s + order.patience_s - TIE_S
            kind[impatient] = KEPT
            rank_s = np.where(impatient, arrival_s - FOREVER_S, rank_s)
        return Judged(kind, rank_s, laxity_s, arrival_s, number)
