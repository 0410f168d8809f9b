"""`Batching`: the contract, and what most batchings do."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Grow, Tier
from sim.engine.decisions import DecisionLog
from sim.engine.plan import ADMITTED, CONTINUED, IterationPlan, PrefillChunk
from sim.engine.sequence import RUNNING, Sequence
from sim.parts.base import Admission, Eviction, Part, Wait, overrides

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler

TOO_LONG = "prompt longer than max_model_len or max_num_batched_tokens"
TOO_LONG_AGAIN = (
    "prompt and generated tokens, to be computed again, longer than max_model_len or max_num_batched_tokens"
)
NEVER_FITS = "prompt needs more KV blocks than the GPU has"


class Batching(Part, ABC):
    """The shape of a step: which sequences prefill, which decode, and in what order they are asked."""

    # Beyond 30 others CPython finds attributes and methods of an object by hashing.
    __slots__ = (
        "_caches", "_delayed", "_splits", "admission", "budget", "counts_out", "eviction", "limits", "max_model_len",
        "max_num_seqs", "order", "partials", "prompt_limit", "stage",
    )  # fmt: skip
    splits_prompts: ClassVar[bool] = False
    """Whether a prompt may be computed in chunks."""
    chunks_are_blocks: ClassVar[bool] = False
    """Whether the token budget of chunks is whole blocks."""
    resumes: ClassVar[bool] = False
    """Whether a sequence that is parked may compute more than a token when it goes on (`resume`)."""
    verifies: ClassVar[bool] = False
    """Whether it verifies tokens that are drafted: it takes slots ahead, and tells the plan what each has `taken`."""
    has_choice: ClassVar[bool] = False
    """Whether `--enable-chunked-prefill` chooses among classes by one name, of which some do."""
    is_unified: ClassVar[bool] = False
    """Whether it is vLLM v1's, with one budget and its engine's host time, and can be scheduled ahead."""
    default_budget: ClassVar[int | None] = None
    """Tokens of an iteration where the user names none; None: vLLM 0.5.5's, by the longest context."""
    queues_batches: ClassVar[bool] = False
    """Whether its one scheduler makes all batches in flight of a pipeline."""
    stops_at_max_model_len: ClassVar[bool] = False
    """Whether a request ends when it has so many tokens, whatever it asked for."""
    schedules_ahead = False
    """Whether a step is scheduled while the one before it runs (vLLM's async scheduling)."""
    frees_in_order: ClassVar[bool] = False
    """Whether sequences that end in one step give their blocks back in the order in which they ran (`in_order`)."""

    unexecutable: ClassVar[str] = ""
    """Why a device cannot carry out its plans, and what to do about it; empty where one can."""

    idle_tokens: ClassVar[int] = 1
    """What a rank without work computes while others iterate (vLLM's dummy batch)."""

    record: DecisionLog | None = None
    """Hears of every step: entries `request:tokens` in the engine's order, then the preempted requests."""
    records_decisions: ClassVar[bool] = False
    """Whether it tells `record`."""

    def all_idle(self) -> None:
        """No rank of those that iterate together has anything to do."""

    def refusal(self, seq: Sequence) -> str | None:
        """Why a request that arrives is not taken at all; None: it is."""
        return None

    def record_repeats(self, count: int) -> None:
        """Where decisions are recorded: the plan had so many further iterations, and decided the same in each."""

    @property
    def reports_copies(self) -> bool:
        """Whether each step, one without work too, is in flight with the copies that had ended when it was launched."""
        return False

    def in_order(self, seqs: list[Sequence]) -> list[Sequence]:
        """Running sequences, in the order in which they run."""
        raise NotImplementedError

    def accepted(self, plan: IterationPlan) -> None:
        """Where it verifies drafts: what each of the plan's decodes has `taken` is known, and about to be counted."""

    def end_in_order(self, plan: IterationPlan, ended: list[Sequence], end_s: float) -> None:
        """Where `frees_in_order`: count the plan's chunks and end the decodes `ended`. Default: the scheduler's."""
        raise NotImplementedError

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        self.limits = limits = scheduler.limits
        self.order = scheduler.order
        self.admission, self.eviction, self.stage = scheduler.admission, scheduler.eviction, scheduler.stage
        self.budget = limits.max_num_batched_tokens
        self.max_num_seqs, self.max_model_len = limits.max_num_seqs, limits.max_model_len
        self.prompt_limit = (
            limits.max_model_len if self.splits_prompts else min(limits.max_model_len, limits.max_num_batched_tokens)
        )
        # Attributes of classes and properties are slow to read at every step.
        self._splits, self._caches = self.splits_prompts, self.memory.caches_prefixes
        self._delayed = self.admission.delayed if overrides(self.admission, "delayed", Admission) else None
        self.counts_out = overrides(self.eviction, "num_out", Eviction)
        """Whether the eviction keeps victims that no other may pass."""
        self.partials: dict[Sequence, None] = {}
        """Half-done prompts, in order of admission."""

    def max_new_tokens(self, seq: Sequence) -> int:
        """Tokens that a request may generate, whatever it asks for: those that the longest context has room for."""
        return self.max_model_len - (seq.num_tokens - seq.num_generated)

    @abstractmethod
    def fill(self, plan: IterationPlan, now_s: float) -> None:
        """Put work into the plan, as far as there is any."""

    @property
    def num_paused(self) -> int:
        """Sequences that hold KV and wait for their turn to decode."""
        return 0

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in self.partials)

    # -- what most of them do ----------------------------------------------------------------------------------------

    def admit(self, plan: IterationPlan, now_s: float, budget: int, num_seqs: int, most: int = 1 << 60) -> None:
        """Admit up to `most` prompts from the head of the queue; the first that cannot start stops all behind it."""
        order, admission, splits, caches = self.order, self.admission, self._splits, self._caches
        max_num_seqs = self.max_num_seqs
        waiting = order.waiting
        num_seqs += self.scheduler.stage.num_returning
        while most and waiting:
            seq = order.head()
            num_new = length = seq.num_tokens
            if caches:
                self.memory.look_up(seq)
                num_new -= self.memory.cached_tokens(seq)
            if splits:
                if num_new > budget:
                    num_new = budget
                length = num_new
            asked = 0 < num_new <= budget and num_seqs < max_num_seqs
            if length > self.prompt_limit:
                self.scheduler.ignore(order.pop(), TOO_LONG_AGAIN if seq.num_generated else TOO_LONG)
            elif asked and admission.admits(seq):
                order.pop()
                self.scheduler.start(seq, now_s)
                plan.add_chunk(seq, num_new, ADMITTED)
                budget -= num_new
                num_seqs += 1
                most -= 1
            elif self.memory.ever_fits(seq, admission.keep_free):
                if asked and self._delayed is not None and self.memory.fits(seq, admission.keep_free):
                    self._delayed(seq)
                return
            else:
                self.scheduler.ignore(order.pop(), NEVER_FITS)

    def decode_all(self, plan: IterationPlan) -> None:
        """Each member of the batch takes a token; the memory has grown for it."""
        batch = self.batch
        plan.decodes = batch.members
        plan.num_decodes = len(batch.members)
        plan.decode_context_tokens = batch.context_tokens

    def decode_or_preempt(self, plan: IterationPlan) -> None:
        """Each member of the batch takes a token; where blocks run out, some are preempted."""
        if self.batch.members:
            if self.memory.grow(self.batch):
                self.decode_all(plan)
            else:
                self.decode_exactly(plan)

    def decode_exactly(self, plan: IterationPlan) -> None:
        """Visit the batch from the left as vLLM does; a member that finds no free block preempts from the right.

        Half-done prompts stand at the right end: they have their blocks, and are the first to lose them.
        """
        batch, memory = self.batch, self.memory
        order = deque(batch.members)
        order.extend(self.partials)
        while order:
            seq = order.popleft()
            if seq in self.partials:
                continue
            while not memory.can_append():
                victim = order.pop() if order else seq
                self.preempt(victim, plan)
                if victim is seq:
                    break
            else:
                plan.num_decodes += 1
                plan.decode_context_tokens += batch.num_tokens_of(seq)
                memory.append(seq)
        plan.decodes = batch.members

    def continue_partials(self, plan: IterationPlan, budget: int) -> int:
        """Go on with half-done prompts, oldest first, within the budget; returns what is left of it."""
        for seq in self.partials:
            chunk = min(seq.num_tokens - seq.num_computed, budget)
            if not chunk:
                break
            plan.add_chunk(seq, chunk, CONTINUED)
            budget -= chunk
        return budget

    def preempt(self, seq: Sequence, plan: IterationPlan) -> None:
        """Take a running sequence out and hand it to the eviction."""
        scheduler = self.scheduler
        scheduler.counters.preemptions += 1
        scheduler.changed = True
        if seq in self.partials:
            self.drop_partial(seq)
        elif seq in self.batch.members:
            self.batch.remove(seq)
        self.eviction.evict(seq, plan)

    def resume(self, seq: Sequence) -> Wait | None:
        """`seq`, parked, has its KV on the GPU: what is not computed of it is a half-done prompt from now on.

        What it has to wait for, and nothing is done; None: it computes on. Here its blocks are taken all at once.
        """
        scheduler, memory = self.scheduler, self.memory
        if scheduler.num_seated >= self.max_num_seqs:
            return "seat"
        if memory.blocks_missing(seq, seq.num_tokens) > memory.gpu.free:
            return "memory"
        memory.take_chunk(seq, seq.num_tokens)
        scheduler.changes.append(Grow(seq, seq.num_blocks))
        self._go_on(seq)
        return None

    def _go_on(self, seq: Sequence) -> None:
        self.scheduler.changed = True
        seq.status = RUNNING
        seq.prefilling = True
        self.partials[seq] = None

    def drop_partial(self, seq: Sequence) -> None:
        """`seq`, half done, is to lose its place."""
        del self.partials[seq]

    def leaving(self, seq: Sequence) -> None:
        """`seq` is about to be taken out of the batch between steps."""

    def commit_chunks(self, plan: IterationPlan, end_s: float, chunks: Iterable[PrefillChunk] | None = None) -> None:
        """Count the computed prompt tokens; complete prompts yield a token and go on. `chunks`: of these alone."""
        for chunk in plan.chunks if chunks is None else chunks:
            seq = chunk.seq
            seq.num_computed += chunk.num_new
            if seq.num_computed < seq.num_tokens:
                self.partials[seq] = None
                continue
            if seq in self.partials:
                del self.partials[seq]
            if self.scheduler.emit_token(seq, end_s):
                self.stage.enter(seq)
