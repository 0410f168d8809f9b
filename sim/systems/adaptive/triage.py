"""`Triage`: requests that it pays to serve in time come first, in order of arrival; others wait, deferred, behind them.

Requests are worth the same and cost differently, so goodput is greatest where the cheapest are served that fit the
time. The price limit is the price (`RequestPrice`) at which the last arrivals, cheapest first, fill `FILL` of their
span, and the room that is left: while an engine fills up, work waits there at no cost. So does work in the queue, until
a third of TTFT is gone.

- Hopeless: its first token is late, or will be; or the tokens expected of it no longer fit its TPOT.
- Deferred: it costs more than the limit; once prefilled, what is left of it does.
- Kept: all others, first come first served.

What was promised is held to what came (`pace`): prices follow the iterations that were carried out, those of prompts
what these took beside decodes, and prompts wait where iterations took longer than TPOT allows. The limit fills less
while first tokens of requests that were kept come too late, and more while none does.

Where TPOT is short, time limits the batch before memory does: iterations are to take `PACE` of it on average, and
prices share an iteration's fixed time among as many as that holds and the prompts beside them. A prompt that is kept
starts while the decodes alone fit `ROOMY_PACE` of it (`most_decodes`): it waits for its time anyway.

Behind the kept wait the deferred, cheapest first, then the hopeless, oldest first. Batching and eviction ask for
classes and laxities. All of it changes with events and every `TICK_S` alone, so that jumps end there.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice
from math import ceil, floor, inf, sqrt
from typing import TYPE_CHECKING, ClassVar, Final, Self

from sim.engine.plan import IterationPlan, Origin, StepTimes
from sim.engine.sequence import Sequence
from sim.parts.base import Order
from sim.systems.adaptive.options import AdaptiveOptions
from sim.systems.adaptive.pace import Beside, Correction, Pace
from sim.systems.adaptive.request_price import Outlook, RequestPrice
from traces.request import Request

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

KEPT: Final = 0
DEFERRED: Final = 1
HOPELESS: Final = 2
Place = tuple[int, float, int]
"""Class, arrival (s) or price (s), request id."""

TICK_S: Final = 0.2
TIE_S: Final = 1e-9
TIE: Final = 1e-6
GOLDEN: Final = (sqrt(5.0) - 1.0) / 2.0
ARRIVALS: Final = 200
EVERY: Final = 20
"""The price limit is found anew after every `EVERY` arrivals, of the last `ARRIVALS`."""
FILL: Final = 0.92
FILL_STEP: Final = 0.5
MISSED: Final = 0.02
"""What is filled falls by so much for each arrival's worth of those kept that could not start in time, beyond `MISSED`
of them. Where few are kept each counts no more: else one of three that is late by chance halves the load."""
LEAST_FILL: Final = 0.3
MOST_FILL: Final = 1.5
PREFILL_MARGIN: Final = 1.3
"""A prompt must fit so many times before the first token's deadline."""
PACE: Final = 0.97
"""Of the TPOT, that iterations are to take on average where it limits the batch; chosen by trials."""
ROOMY_PACE: Final = 0.9
"""The same where blocks or seats do, and what is left is for turns; and of the decodes alone where a prompt starts."""
SHORT: Final = 0.25
"""Share of answers that are too short to lose what is saved of the pace at once."""
FIRST_ITERATIONS: Final = 2.0
"""That a first token waits for beside its prompt's own time: the one under way, and the one that computes it."""
TOO_LATE: Final = "rejected: its first token would come too late"
"""As Mooncake's requests are told that are turned away for theirs."""
MOST_TPOTS: Final = 8
"""Of those that arrivals ask for, that are compared."""
QUIET_S: Final = 10.0
URGENT: Final = 1 / 3
"""Of the TTFT, that prompts may wait before they are urgent, and work before it is too much."""
FOREVER_S: Final = 1e12


def first_beyond(values: Iterable[float], limit: float) -> float:
    """Of values that are not negative, the one that takes the sum of the least beyond `limit`; inf if none does."""
    total = 0.0
    for value in sorted(values):
        total += value
        if total > limit:
            return value
    return inf


class Arrival:
    """What the price limit is found of.

    Args:
        tpot_slo_s: that it is to meet.
        prompt_s: price of its prompt.
        num_tokens: that it decodes.
        price: what its output takes.
    """

    def __init__(
        self,
        arrival_s: float,
        tpot_slo_s: float,
        prompt_tokens: int,
        prompt_s: float,
        num_tokens: float,
        kept: bool,
        price: RequestPrice,
    ) -> None:
        self.arrival_s, self.tpot_slo_s, self.kept = arrival_s, tpot_slo_s, kept
        self.prompt_tokens, self.prompt_s, self.num_tokens = prompt_tokens, prompt_s, num_tokens
        self.decodes_s = price.decodes_s(num_tokens, prompt_tokens)
        # Iterations of a full batch that it fills, by blocks or seats alone and by time alone.
        self.by_room, self.by_time = price.iterations_by_limit(num_tokens, prompt_tokens, prompt_s)

    def priced_anew(self, price: RequestPrice) -> "Arrival":
        """The same at other prices of its output."""
        known = self.arrival_s, self.tpot_slo_s, self.prompt_tokens, self.prompt_s, self.num_tokens, self.kept
        return Arrival(*known, price)


class Triage(Order):
    """A queue by class.

    Args:
        ttft_slo_s, tpot_slo_s: what requests are to meet that say nothing of it themselves (`Request.slos`).
        patience_s: a request that has waited so long is kept whatever it costs; 0: none is.
        refuses: hopeless requests that have had no token are turned away.
    """

    name: ClassVar[str] = "triage"
    options: ClassVar[type | None] = AdaptiveOptions
    sticky: ClassVar[bool] = False
    follows_all: ClassVar[bool] = True
    memoized = ("_num_decodes", "_context_tokens", "_decodes_s", "_outlooks")

    def __init__(self, ttft_slo_s: float, tpot_slo_s: float, patience_s: float = 0.0, *, refuses: bool = False) -> None:
        self.ttft_slo_s, self.tpot_slo_s, self.patience_s = ttft_slo_s, tpot_slo_s, patience_s
        self.refuses = refuses
        self.kept_tpot_s = tpot_slo_s
        """The TPOT that iterations keep to: that of some of the last arrivals."""
        # In order, and the place of each.
        self._queue: list[Sequence] = []
        self._places: list[Place] = []
        self._place: dict[Sequence, Place] = {}
        # Of requests that wait or are parked, and have a predicted length: meanwhile theirs does not change.
        self._outlooks: dict[Sequence, Outlook] = {}
        self.waiting = self._queue
        self._arrivals: deque[Arrival] = deque(maxlen=ARRIVALS)
        self._num_arrivals = 0
        self.price_limit_s = inf
        self.tokens_per_iteration = 0.0
        """Prompt tokens of the last `ARRIVALS`, for each iteration that their decodes fill."""
        self.kept_tokens_per_s = 0.0
        """Prompt tokens of the requests that were kept as they arrived, of the last `ARRIVALS`."""
        self.num_kept = 0
        """Of the requests that wait."""
        self._num_hopeless = 0
        self.fill = 1.0
        """Times `FILL`, that the limit is to fill: less while first tokens of requests that were kept come too late."""
        self._num_missed = 0
        self.num_price_limits = 0
        """How often the price limit was found."""
        self.is_urgent = False
        """Whether the first that is kept has waited for `URGENT` of its TTFT."""
        self.is_quiet = False
        """Whether no request has arrived for `QUIET_S`."""
        self._next_tick_s = 0.0
        # Of the batch that was asked for last, and what its iteration takes without prompts.
        self._num_decodes = self._context_tokens = -1
        self._decodes_s = 0.0
        self._decode_share = 1.0
        """Of time, what is not for the prompts to be expected."""
        self._prompt_s = 0.0
        """Of prompts that are kept, for each token that is decoded."""
        self.changed = True
        """Whether this step follows an event or a tick: else all answers are as they were."""
        self._stale = True
        self._end_s = 0.0
        """When the last iteration that was committed ends."""
        self._measures = False
        """Whether the next iteration tells how wrong prices are: the first after an arrival does."""

    @classmethod
    def build(cls, b: "Builder") -> Self:
        options = b.options(AdaptiveOptions)
        refuses = options.late == "refuse"
        return cls(options.ttft_slo_s, options.tpot_slo_s, options.patience_s, refuses=refuses)

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        self.cost = scheduler.deployment.cost
        limits = scheduler.limits
        longest = limits.max_model_len if scheduler.batching.stops_at_max_model_len else inf
        self.price = RequestPrice(self.cost, limits, longest)
        self.pace, self.correction, self.beside = Pace(), Correction(self.cost), Beside()
        self._keep_pace(is_limit=False)
        self._asks_anew = limits.window is not None or self.cost.follows_longest

    # -- prospects -----------------------------------------------------------------------------------------------------

    def ttft_of(self, request: Request) -> float:
        """TTFT that it is to meet, s."""
        slos = request.slos
        return self.ttft_slo_s if slos is None or slos.ttft_s is None else slos.ttft_s

    def tpot_of(self, request: Request) -> float:
        """TPOT that it is to meet, s."""
        slos = request.slos
        return self.tpot_slo_s if slos is None or slos.tpot_s is None else slos.tpot_s

    def outlook(self, seq: Sequence) -> Outlook:
        """What its class follows from."""
        return self.outlook_after(seq, self.scheduler.num_generated_of(seq))

    def outlook_after(self, seq: Sequence, generated: int) -> Outlook:
        """The same of one that has so many tokens, as the batch says of its members."""
        request, price, num_tokens = seq.request, self.price, seq.num_tokens
        left = price.tokens_left(seq, generated)
        work_s = price.decodes_s(left, request.prompt_tokens + generated)
        prompt_s = 0.0
        if seq.prefilling:
            # Of requests alike some fit: those kept are to be spread evenly, not all or none.
            prompt_s = price.prefill_s(num_tokens) * (1.0 + TIE * (request.request_id * GOLDEN % 1.0))
            work_s += price.prompt_work_s(prompt_s)
        if seq.first_token_s < 0.0:
            due_s = request.arrival_s + self.ttft_of(request)
            return Outlook(due_s, FIRST_ITERATIONS, PREFILL_MARGIN * prompt_s, work_s, prompt_s)
        return Outlook(self._last_due_s(seq, generated + left), left, prompt_s, work_s, prompt_s)

    def _last_due_s(self, seq: Sequence, num_tokens: float) -> float:
        """When the last of so many tokens must have come, after the first; -inf where that came too late."""
        request = seq.request
        if seq.first_token_s > request.arrival_s + self.ttft_of(request) + TIE_S:
            return -inf
        return seq.first_token_s + self.tpot_of(request) * (num_tokens - 1)

    def look(self, seq: Sequence) -> Outlook:
        """The outlook of one that waits or is parked."""
        outlook = self._outlooks.get(seq)
        if outlook is None:
            outlook = self.outlook(seq)
            self._keep(seq, outlook)
        return outlook

    def _keep(self, seq: Sequence, outlook: Outlook) -> None:
        if seq.predicted_median_tokens:
            self._outlooks[seq] = outlook

    def standing(self, seq: Sequence, generated: int, iteration_s: float) -> tuple[int, float, float]:
        """Class, laxity (s) and rank (s) of a member that has so many tokens; of most no outlook is made."""
        if seq.prefilling or seq.first_token_s < 0.0 or self.patience_s:
            outlook = self.outlook_after(seq, generated)
            laxity_s = self.laxity_s(outlook, iteration_s)
            return self.class_of(seq, outlook, laxity_s), laxity_s, self.rank_s(seq, outlook)
        request, price = seq.request, self.price
        left = price.tokens_left(seq, generated)
        work_s = price.decodes_s(left, request.prompt_tokens + generated)
        laxity_s = self._last_due_s(seq, generated + left) - self.scheduler.now_s - left * iteration_s
        return HOPELESS if laxity_s < 0.0 else DEFERRED if work_s > self.price_limit_s else KEPT, laxity_s, work_s

    def is_impatient(self, seq: Sequence) -> bool:
        """Whether it has waited for so long that price does not count."""
        return bool(self.patience_s) and self.scheduler.now_s >= seq.request.arrival_s + self.patience_s - TIE_S

    def rank_s(self, seq: Sequence, outlook: Outlook) -> float:
        """Kept and parked sequences return in this order, and leave in the reverse: price; the impatient before all."""
        if self.patience_s and self.is_impatient(seq):
            return seq.request.arrival_s - FOREVER_S
        return outlook.work_s

    def iteration_s(self) -> float:
        """What an iteration takes, its share of the prompts that are to be expected included: the pace bounds these."""
        decodes_s = self.decodes_s()
        return min(decodes_s / self._decode_share, max(decodes_s, self.pace.iteration_s))

    def decodes_s(self) -> float:
        """What it takes without prompts."""
        batch = self.batch
        num_decodes, context_tokens = len(batch.members) or 1, batch.context_tokens
        if context_tokens != self._context_tokens or num_decodes != self._num_decodes or self._asks_anew:
            # Else of the same batch: asked several times a step.
            self._num_decodes, self._context_tokens = num_decodes, context_tokens
            self._decodes_s = self.cost.decode_steps(num_decodes, context_tokens, batch.windowed, batch.longest_tokens)[
                0
            ]
        return self.price.factor * self._decodes_s

    def first_due_s(self, seq: Sequence) -> float:
        """When the first token of one that waits must have come; inf where it has, or is waited for however late."""
        if seq.first_token_s >= 0.0 or self.is_impatient(seq):
            return inf
        return seq.request.arrival_s + self.ttft_of(seq.request)

    def most_decodes(self, *, alone: bool = False) -> float:
        """How many may decode together so that all that are kept meet their TPOT; no limit where none can be left.

        Beside them go the prompts that are kept, unless `alone`.
        """
        members = len(self.batch.members)
        if self.is_quiet or not members:
            return inf
        price, prompt_s = self.price, 0.0 if alone else self._prompt_s
        member_s = (self.decodes_s() - price.step_s) / members
        within_s = ROOMY_PACE * self.kept_tpot_s
        return max(1.0, price.most_decodes(within_s, self.batch.context_tokens / members, member_s, prompt_s))

    def laxity_s(self, outlook: Outlook, iteration_s: float, arrival_s: float = 0.0) -> float:
        """How long it could stand still and meet its SLOs yet; infinitely little where it is late already.

        `arrival_s`: of one that has come since the last step was scheduled, when that was tells nothing.
        """
        now_s = max(self.scheduler.now_s, arrival_s)
        return outlook.due_s - now_s - outlook.num_left * iteration_s - outlook.prompt_s

    def class_of(self, seq: Sequence, outlook: Outlook, laxity_s: float) -> int:
        """`KEPT`, `DEFERRED` or `HOPELESS`, by its outlook and how lax it is."""
        if self.patience_s and self.is_impatient(seq):
            return KEPT
        if laxity_s < 0.0:
            return HOPELESS
        if outlook.work_s > self.price_limit_s:
            return DEFERRED
        # Its tokens would come too slowly.
        is_tight = seq.first_token_s < 0.0 and self.tpot_of(seq.request) < self.kept_tpot_s - TIE_S
        return DEFERRED if is_tight else KEPT

    # -- arrivals ----------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self._stale = self._measures = True
        outlook = self.outlook(seq)
        kept, request, price = self._insert(seq, outlook) == KEPT, seq.request, self.price
        tpot_s, left = self.tpot_of(request), price.tokens_left(seq, 0)
        self._arrivals.append(Arrival(request.arrival_s, tpot_s, seq.num_tokens, outlook.first_s, left, kept, price))
        self._num_arrivals += 1
        if self._num_arrivals % EVERY == 0:
            self._find_price_limit()

    def _find_price_limit(self) -> None:
        """The price up to which the last arrivals fit their span, cheapest first."""
        price, span_s = self.price, self._arrivals[-1].arrival_s - self._arrivals[0].arrival_s
        if span_s <= 0.0:
            return
        self.num_price_limits += 1
        self._choose_tpot(span_s)
        arrivals = self._arrivals
        price.correct(self.correction.factor)
        by_room = by_time = 0.0
        prompt_tokens = kept_tokens = 0
        kept: list[Arrival] = []
        for arrival in arrivals:
            by_room += arrival.by_room
            by_time += arrival.by_time
            prompt_tokens += arrival.prompt_tokens
            if arrival.kept:
                kept.append(arrival)
                kept_tokens += arrival.prompt_tokens
        self.kept_tokens_per_s = kept_tokens / span_s
        if self.price_limit_s != inf:
            num_kept = sum(arrival.kept for arrival in islice(reversed(arrivals), EVERY))
            step = FILL_STEP * (self._num_missed - MISSED * num_kept) / EVERY
            self.fill = min(MOST_FILL, max(LEAST_FILL, self.fill * (1.0 - step)))
        self._num_missed = 0
        # The prompts that are computed are those of requests that are kept, as a rule the shorter ones.
        prompts_s = num_tokens = 0.0
        for arrival in kept or list(arrivals):
            prompts_s += arrival.prompt_s
            num_tokens += arrival.num_tokens
        self.beside.next_piece()
        price.beside = self.beside.factor
        self._decode_share = 1.0 - min(0.8, self.kept_tokens_per_s * price.token_s * price.beside)
        self._prompt_s = price.beside * prompts_s / num_tokens
        self._keep_pace(is_limit=by_time >= by_room)
        self._outlooks.clear()
        self.tokens_per_iteration = prompt_tokens / max(by_room, by_time)
        work_s = [arrival.decodes_s + price.prompt_work_s(arrival.prompt_s) for arrival in arrivals]
        filled_s = self.fill * FILL * span_s
        self.price_limit_s = first_beyond(work_s, filled_s + max(self._room_s(), self._queue_s()))

    def _choose_tpot(self, span_s: float) -> None:
        """Of the TPOTs that the last arrivals ask for, keep the one in which most of those that it is enough for fit.

        One that is not kept is too tight for it, or looser than it need be.
        """
        found, tpot_s = set[float](), -1.0
        for arrival in self._arrivals:
            if arrival.tpot_slo_s != tpot_s:
                tpot_s = arrival.tpot_slo_s
                found.add(tpot_s)
        asked = sorted(found)
        asked = [tpot_s for tpot_s in asked if PACE * tpot_s > self.price.step_s] or asked
        asked = asked[:: ceil(len(asked) / MOST_TPOTS)]
        best_s = asked[0]
        if len(asked) > 1:
            best_s = max(asked, key=lambda tpot_s: (self._try_pace(tpot_s, span_s), -tpot_s))
        if best_s != self.kept_tpot_s:
            self.kept_tpot_s = best_s
            self.price.keep_pace(PACE * best_s)
            self._arrivals = deque([arrival.priced_anew(self.price) for arrival in self._arrivals], maxlen=ARRIVALS)

    def _try_pace(self, tpot_s: float, span_s: float) -> int:
        """How many of the last arrivals fit their span at this TPOT, cheapest first."""
        price = self.price
        price.keep_pace(PACE * tpot_s)
        enough = [arrival for arrival in self._arrivals if arrival.tpot_slo_s >= tpot_s]
        work_s = (price.decodes_s(a.num_tokens, a.prompt_tokens) + price.prompt_work_s(a.prompt_s) for a in enough)
        return bisect_right(list(accumulate(sorted(work_s))), self.fill * FILL * span_s)

    def _keep_pace(self, *, is_limit: bool) -> None:
        """Whether TPOT limits the batch is known anew; no pace is kept where weights alone take longer."""
        share = PACE if is_limit else ROOMY_PACE
        pace_s = share * self.kept_tpot_s
        self.price.keep_pace(pace_s, is_limit=is_limit)
        # An answer of n tokens has a TPOT for each, and loses what that is longer than an iteration.
        tokens = sorted([arrival.num_tokens for arrival in self._arrivals if arrival.kept])
        most = (1.0 / share - 1.0) * tokens[int(SHORT * len(tokens))] if tokens else inf
        self.pace.keep(pace_s if pace_s > self.price.step_s else inf, most)

    def _room_s(self) -> float:
        """Work of requests like those that decode that there is room for until it is full to `FILL`, s.

        None where TPOT limits the batch before room does: work that waits there would be late.
        """
        scheduler, members = self.scheduler, self.batch.members
        if not members:
            return inf
        full = max(len(members) / scheduler.limits.max_num_seqs, 1.0 - scheduler.gpu.free / scheduler.gpu.num_blocks)
        if full >= FILL or len(members) / self.most_decodes() >= full:
            return 0.0
        return (FILL / full - 1.0) * sum([self.outlook(seq).work_s for seq in members])

    def _queue_s(self) -> float:
        """Work that may wait beside what is kept and waits, so that no first token waits longer than it may, s."""
        kept = self.kept()
        may_wait_s = URGENT * min((self.ttft_of(seq.request) for seq in kept), default=self.ttft_slo_s)
        return max(0.0, may_wait_s - sum([self.look(seq).work_s for seq in kept]))

    def put_back(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._insert(seq, self.outlook(seq))
        self._stale = True

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _insert(self, seq: Sequence, outlook: Outlook) -> int:
        kind = self.class_of(seq, outlook, self.laxity_s(outlook, self.iteration_s(), seq.request.arrival_s))
        key = outlook.work_s if kind == DEFERRED else seq.request.arrival_s
        self._place_at(seq, (kind, key, seq.request.request_id))
        self._keep(seq, outlook)
        return kind

    def _place_at(self, seq: Sequence, place: Place) -> None:
        self._place[seq] = place
        i = bisect_left(self._places, place)
        self._places.insert(i, place)
        self._queue.insert(i, seq)
        self.num_kept += place[0] == KEPT
        self._num_hopeless += place[0] == HOPELESS

    def give_up(self, seq: Sequence) -> None:
        """One that waits and is kept would have its first token too late."""
        self._num_missed += 1
        self.remove(seq)
        self._place_at(seq, (HOPELESS, seq.request.arrival_s, seq.request.request_id))

    def head(self) -> Sequence:
        return self._queue[0]

    def pop(self) -> Sequence:
        seq = self.head()
        self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> bool:
        place = self._place.pop(seq, None)
        if place is None:
            return False
        self._outlooks.pop(seq, None)
        i = bisect_left(self._places, place)
        del self._places[i], self._queue[i]
        self.num_kept -= place[0] == KEPT
        self._num_hopeless -= place[0] == HOPELESS
        self._stale = True
        return True

    def is_kept(self, seq: Sequence) -> bool:
        """Whether one that waits is kept."""
        return self._place[seq][0] == KEPT

    def is_hopeless(self, seq: Sequence) -> bool:
        """Whether one that waits is hopeless."""
        return self._place[seq][0] == HOPELESS

    def kept(self) -> list[Sequence]:
        """Those that wait and are kept, in order."""
        return self._queue[: self.num_kept]

    def first_kept(self, most: int) -> list[Sequence]:
        """Of them the first, so many at most."""
        return self._queue[: min(most, self.num_kept)]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    # -- time --------------------------------------------------------------------------------------------------------

    def prepare(self, now_s: float) -> None:
        self.changed = self._stale or now_s >= self._next_tick_s - TIE_S
        if not self.changed:
            return
        self._next_tick_s = TICK_S * (floor((now_s + TIE_S) / TICK_S) + 1)
        self.is_quiet = bool(self._arrivals) and now_s > self._arrivals[-1].arrival_s + QUIET_S - TIE_S
        iteration_s = self.iteration_s()
        hoping = len(self._queue) - (0 if self.patience_s else self._num_hopeless)
        moved: list[tuple[Sequence, Outlook]] = []
        num_kept, num_hoping = self.num_kept, len(self._queue) - self._num_hopeless
        for i, seq in enumerate(self._queue[:hoping]):
            old = KEPT if i < num_kept else DEFERRED if i < num_hoping else HOPELESS
            outlook = self.look(seq)
            kind = self.class_of(seq, outlook, self.laxity_s(outlook, iteration_s))
            if kind == HOPELESS and old == KEPT and seq.first_token_s < 0.0:
                self._num_missed += 1
            if kind != old or (kind == DEFERRED and self._places[i][1] != outlook.work_s):
                moved.append((seq, outlook))
        for seq, _ in moved:
            self.remove(seq)
        for seq, outlook in moved:
            self._insert(seq, outlook)
        if self.refuses and self._num_hopeless:
            self._refuse()
        if self.num_kept:
            first = self._queue[0].request
            self.is_urgent = now_s - first.arrival_s >= URGENT * self.ttft_of(first) - TIE_S
        else:
            self.is_urgent = False
        self._stale = False

    def _refuse(self) -> None:
        hopeless = self._queue[len(self._queue) - self._num_hopeless :]
        for seq in hopeless:
            if seq.first_token_s < 0.0:
                self.remove(seq)
                self.scheduler.ignore(seq, TOO_LATE)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """Until the next tick, if it could change anything; one iteration if the next looks anew anyway."""
        if self._queue or self.scheduler.eviction.num_out:
            if self._stale:
                return 1
            plan.until_s = min(plan.until_s, self._next_tick_s)
        return steps

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        begin_s, self._end_s = max(self.scheduler.now_s, self._end_s), times.end_s
        if plan.num_decodes or len(self.batch.members) > plan.num_sampled_prefills:
            self.pace.carried_out(begin_s, times, decodes=plan.num_decodes > 0)
        else:
            self.pace.rest()
        if plan.prefill_tokens and not plan.has_swaps:
            self._measure_prompts(plan, begin_s, times.first_end_s)
        if self._measures and not plan.has_swaps:
            self._measures = False
            self.correction.add(plan, times.first_end_s - begin_s)

    def _measure_prompts(self, plan: IterationPlan, begin_s: float, end_s: float) -> None:
        """The first iteration of `plan`, which has some, was carried out."""
        price = self.price
        alone_s = 0.0 if len(self.batch.members) > plan.num_sampled_prefills else price.step_s
        if plan.num_decodes:
            decodes, context_tokens, windowed = plan.num_decodes, plan.decode_context_tokens, plan.decode_window
            steps = self.cost.decode_steps(decodes, context_tokens, windowed, plan.decode_longest_tokens)
            alone_s = price.factor * steps[0]
        started = sum(
            price.prefill_s(chunk.seq.request.prompt_tokens)
            for chunk in plan.chunks
            if chunk.origin is Origin.ADMITTED and not 0.0 <= chunk.seq.first_token_s < end_s - TIE_S
        )
        self.beside.add(end_s - begin_s - alone_s, started)

    def joined(self, seq: Sequence) -> None:
        self._outlooks.pop(seq, None)
        self._stale = True

    def left(self, seq: Sequence) -> None:
        self._outlooks.pop(seq, None)
        self._stale = True
        if seq.num_generated >= seq.output_tokens:
            self.price.history.add(seq.num_generated)

    def transferred(self, move: object) -> None:
        self._stale = True
