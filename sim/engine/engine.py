"""`Engine`: the sans-IO core that both clocks drive.

It is told events (a request arrived, a copy ended, an iteration ended, it is now t) and returns what to do next. It
never waits, reads no clock and draws no random number: the simulator and the GPU runtime differ only in what measures
time.
"""

from collections.abc import Callable

from sim.engine.changes import Move
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.predictor import LengthPredictor
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import CallingSequence, Sequence, Status
from sim.errors import UserError
from traces.request import Request


class Engine:
    """One serving instance: a scheduler, what it predicts of output lengths, and what is called for ended sequences."""

    __slots__ = ("_ended", "_predict", "on_end", "on_idle", "scheduler")

    def __init__(self, scheduler: Scheduler, predictor: LengthPredictor, on_end: Callable[[Sequence], None]) -> None:
        self.scheduler = scheduler
        self._predict = predictor.predict
        self.on_end = on_end
        self._ended = scheduler.finished
        self.on_idle: Callable[[float], None] | None = None
        """Hears when nothing can be done until another event arrives."""

    def add_request(self, request: Request) -> Sequence:
        """Event: `request` arrived. UserError where it calls tools and the stage has no place for such sequences."""
        seq = self._calling(request) if request.calls else Sequence(request)
        seq.predicted_lower_tokens, seq.predicted_median_tokens = self._predict(request)
        self.scheduler.add(seq)
        return seq

    def _calling(self, request: Request) -> CallingSequence:
        stage = self.scheduler.stage
        if not stage.takes_calls:
            raise UserError(
                f"request {request.request_id}: the trace says that it calls a tool, and stage={stage.name} lets no "
                "sequence wait for one: give --policy SYSTEM:stage=tool-calls, or a system for tool calls "
                "(`kvtwin policies`)"
            )
        return CallingSequence(request)

    def offer(self, seq: Sequence) -> None:
        """Event: `seq`, new here, has its first token and its KV on another engine, where it may be pulled from."""
        self.scheduler.stage.offer(seq)

    def pull(self, now_s: float) -> list[Move]:
        """What to copy from other engines before anything else, where the stage is `blocking`."""
        self.scheduler.stage.prepare(now_s)
        pulled, self.scheduler.pulled = self.scheduler.pulled, []
        return pulled

    def schedule(self, now_s: float) -> IterationPlan | None:
        """What to do at `now_s`; None if nothing can be done until another event arrives."""
        plan = self.scheduler.schedule(now_s)
        if self._ended:
            self._report_ended()
        if plan is None and self.on_idle is not None:
            self.on_idle(now_s)
        return plan

    def commit(self, plan: IterationPlan, times: StepTimes) -> None:
        """Event: `plan` was carried out, its tokens came at `times`."""
        self.scheduler.commit(plan, times)
        if self._ended:
            self._report_ended()

    @property
    def schedules_ahead(self) -> bool:
        """Whether plans are to be made before the tokens of the one before them are known (`commit_ahead`)."""
        return self.scheduler.batching.schedules_ahead

    def commit_ahead(self, plan: IterationPlan, times: StepTimes) -> list[Sequence]:
        """`plan`, in flight, will be carried out, its tokens will come at `times`; the sequences that end with them.

        These keep what they hold, and compute no more, until `deliver`.
        """
        return self.scheduler.commit_ahead(plan, times)

    def deliver(self, ended: list[Sequence]) -> None:
        """Event: the tokens of the oldest plan in flight came, the last ones of `ended`."""
        self.scheduler.deliver(ended)
        if self._ended:
            self._report_ended()

    def truncate(self, seq: Sequence, output_tokens: int) -> None:
        """Event: the `output_tokens`-th token of `seq`, yet to be committed or computed, is its last."""
        self.scheduler.truncate(seq, output_tokens)

    def stop(self, seq: Sequence, output_tokens: int, now_s: float) -> None:
        """Event: the `output_tokens`-th token of `seq`, which came at `now_s`, was its last (scheduled ahead).

        Tokens of it that are in flight are dropped. It must not be among those that `deliver` hears of.
        """
        self.scheduler.stop(seq, output_tokens, now_s)
        if self._ended:
            self._report_ended()

    def cancel(self, seq: Sequence) -> None:
        """Event: the client of `seq` has left. Its memory is free after its next token at the latest."""
        self.scheduler.cancel(seq)
        if self._ended:
            self._report_ended()

    def fail(self, seq: Sequence, reason: str) -> None:
        """Event: what `seq` computed or held is lost (a copy or kernel failed). It ends as `cancel` says, in error."""
        if seq.error or seq.status in (Status.FINISHED, Status.IGNORED):
            return
        self.scheduler.cancel(seq)
        seq.error = f"failed: {reason}"
        failed = self.scheduler.counters.ignored
        failed[seq.error] = failed.get(seq.error, 0) + 1
        if self._ended:
            self._report_ended()

    def transfer_done(self, move: Move) -> None:
        """Event: a background copy of an earlier plan, or one that another engine pulled, ended."""
        self.scheduler.transfer_done(move)

    def name_blocks(self, seq: Sequence, keys: tuple[int, ...]) -> None:
        """Event: what `seq`, which runs, has generated fills more of its blocks; the `keys` of their content."""
        self.scheduler.memory.name_blocks(seq, keys)

    @property
    def wakes_s(self) -> float:
        """When to ask again where nothing can be done and no other event comes first, s; infinite where never."""
        return self.scheduler.wakes_s

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is still to end."""
        return self.scheduler.has_unfinished

    def _report_ended(self) -> None:
        for seq in self._ended:
            self.on_end(seq)
        self._ended.clear()
