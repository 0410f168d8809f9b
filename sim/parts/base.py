"""The contracts of the parts. A scheduler (`sim.engine.scheduler`) is six of them and what they share.

One step of the scheduler asks them in this order:

1. `prepare(now_s)` of every part that has one: bring sequences back, offload ahead of need, age the queue. Then
   `reserve()`: take what the coming step needs on top of what the batching will ask for.
2. `Batching.fill(plan, now_s)`: the shape of the iteration. It asks `Order.head` and `Admission.admits` who may start,
   `Memory` for blocks, and `Eviction.evict` whom to take them from.
3. `holds(plan, steps)` of every part that has one, where the plan could repeat itself: for how many iterations the
   answers just given stay the same. The scheduler takes the least.
4. `complete(plan)` of every part that has one: what else is copied.
5. After the iteration: `committed(plan, times)`; of one scheduled ahead `delivered()`, `committed` when it is launched.
   As it happens: `joined` (a sequence enters the decode batch), `parked` (it has its first token and waits outside),
   `moved` (it got a token more than the batch), `left` (it ended, or is to be computed again), `transferred` (a copy
   has ended).

Predicates (`admits`, `fits`, `ever_fits`, `can_append`) change nothing. Only `Memory` touches the pools. A hook that a
part does not override is never called.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from math import inf
from typing import TYPE_CHECKING, ClassVar

from sim.engine.batch import DecodeBatch
from sim.engine.blocks import BlockPool
from sim.engine.changes import Move, Tier
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class Part:
    """What all parts have: the scheduler that they serve, and hooks into its step (see the module)."""

    scheduler: "Scheduler"
    memory: "Memory"
    batch: DecodeBatch

    def bind(self, scheduler: "Scheduler") -> None:
        """Take notice of the scheduler and, through it, of the other parts. Called once, in the order of `Parts`.

        UserError where the parts do not go together.
        """
        self.scheduler, self.memory, self.batch = scheduler, scheduler.memory, scheduler.batch

    def prepare(self, now_s: float) -> None:
        """Before the queues are looked at."""

    def reserve(self) -> None:
        """After every part has prepared."""

    def complete(self, plan: IterationPlan) -> None:
        """The plan has its work: add what moves."""

    def holds(self, plan: IterationPlan, steps: int) -> int:
        """For how many iterations like `plan`, 1 to `steps`, this part's answers stay what they are.

        A part that knows a time instead may lower `plan.until_s`. Arrivals are the order's business: where `sticky`, a
        jump runs through them if somebody waits.
        """
        return steps

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        """The plan was carried out."""

    def delivered(self) -> None:
        """Of the plans that are committed ahead the oldest was carried out; who ended with it has left."""

    def joined(self, seq: Sequence) -> None:
        """`seq` is in the decode batch from now on."""

    def parked(self, seq: Sequence) -> None:
        """`seq`, prefilled, waits outside the batch from now on."""

    def moved(self, seq: Sequence) -> None:
        """`seq`, a member of the batch, has a token more than the batch's step says."""

    def left(self, seq: Sequence) -> None:
        """`seq` ended, or gives up its KV."""

    def transferred(self, move: Move) -> None:
        """A copy beside or behind the computation has ended; the memory knows already."""

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        """Sequences that are in this part's care and hold blocks, and where. For recounts."""
        return ()


class Order(Part, ABC):
    """Who is next among those waiting."""

    sticky: ClassVar[bool]
    """Whether no arrival can overtake a head that was refused."""
    waiting: Sized
    """As long as there are sequences that wait, true if there are any: the order itself, or what is quicker to ask."""

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        self.waiting = getattr(self, "waiting", self)

    @abstractmethod
    def add(self, seq: Sequence) -> None:
        """A request arrived."""

    @abstractmethod
    def put_back(self, seqs: list[Sequence]) -> None:
        """Preempted sequences, the last preempted first among them, wait again."""

    @abstractmethod
    def head(self) -> Sequence:
        """Who is next; there must be somebody."""

    @abstractmethod
    def pop(self) -> Sequence:
        """Take the head out."""

    @abstractmethod
    def remove(self, seq: Sequence) -> bool:
        """Take `seq` out, whatever its place; False if it does not wait."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]: ...


class Memory(Part, ABC):
    """All pools, and what is where. `unit` pool blocks hold `block_size` tokens of the whole model.

    Holds Eq. 5's ledger: the pools' running totals. `recount` is for tests: what the pools should say, counted from the
    sequences.
    """

    gpu: BlockPool
    host: BlockPool
    unit: int
    num_groups: int
    """Layer groups: 1 where a block spans the model, the layer count where it holds one layer."""

    def __init__(self, limits: Limits, num_groups: int) -> None:
        self.limits = limits
        self.block_size = limits.block_size
        self.unit = self.num_groups = num_groups
        self.gpu = BlockPool("GPU KV blocks", limits.num_gpu_blocks * num_groups)
        self.host = BlockPool("host KV blocks", limits.num_cpu_blocks * num_groups)
        self.copies_of = {}
        self.releasing = 0

    # -- prompts ---------------------------------------------------------------------------------------------------

    def blocks_for(self, seq: Sequence) -> int:
        """Pool blocks that a prompt takes, with what was generated before a recomputation. As `held_blocks`."""
        raise NotImplementedError

    @abstractmethod
    def ever_fits(self, seq: Sequence, keep_free: int) -> bool:
        """Whether an empty GPU could take the prompt and still have `keep_free` whole blocks left."""

    @abstractmethod
    def fits(self, seq: Sequence, keep_free: int) -> bool:
        """Whether the prompt has its blocks now (never unless `ever_fits`). A refusal lasts until blocks are freed."""

    @abstractmethod
    def place(self, seq: Sequence, keep_free: int) -> None:
        """Take the blocks of a prompt that `fits`, all of them even if only a chunk is computed now.

        What it hits counts as computed (`seq.num_computed`).
        """

    # -- decodes ---------------------------------------------------------------------------------------------------

    # Blocks taken as sequences grow, `unit` pool blocks a whole block; memory that reserves overrides all of it.

    def can_append(self) -> bool:
        """Whether one more sequence can take its next token, as vLLM asks: one block must be free, needed or not."""
        return self.gpu.free >= self.unit

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the next token of a sequence, in the batch or about to join, begins a block."""
        batch = self.batch
        tokens = batch.num_tokens_of(seq) if seq in batch.members else seq.num_tokens
        return (tokens - 1) % self.block_size == 0

    def append(self, seq: Sequence) -> None:
        """Take the block that the next token of a member of the batch needs, if any."""
        if self.batch.needs_block(seq):
            self.gpu.allocate(self.unit)

    def grow(self, batch: DecodeBatch, spare: int = 1) -> bool:
        """Take what the next iteration of the whole batch needs, by counts alone.

        False, and nothing is taken, where fewer than `spare` whole blocks would be left: vLLM wants one free for each
        sequence it visits, needed or not, so that the exact walk over single sequences (`append`) must decide then.
        """
        needed = batch.blocks_needed(1)
        if self.gpu.free < (needed + spare) * self.unit:
            return False
        if needed:
            self.gpu.allocate(needed * self.unit)
        return True

    def grow_further(self, batch: DecodeBatch, steps: int) -> None:
        """Take what iterations 2 to `steps` of the whole batch need."""
        self.gpu.allocate((batch.blocks_needed(steps) - batch.blocks_needed(1)) * self.unit)

    def holds(self, plan: IterationPlan, steps: int) -> int:
        """As long as one whole block stays free: vLLM wants one for each sequence it visits, needed or not."""
        batch = self.batch
        # The first iteration's blocks are taken already.
        spare = self.gpu.free // self.unit + batch.blocks_needed(1) - 1
        if spare // len(batch.members) * batch.block_size < steps:
            return max(1, min(steps, batch.steps_within(spare)))
        return steps

    # -- the way out -----------------------------------------------------------------------------------------------

    def held_blocks(self, seq: Sequence) -> int:
        """Pool blocks that a sequence holds between steps, wherever they are. Where blocks span all layers."""
        raise NotImplementedError

    @abstractmethod
    def release(self, seq: Sequence) -> None:
        """Give back all that a sequence, which is not in the batch, holds."""

    def hold(self, seq: Sequence) -> None:
        """`seq`, in no batch, is released when its last token comes."""

    def forget(self, seq: Sequence) -> None:
        """`seq`, which holds nothing, will not come back."""

    @property
    def num_evicted(self) -> int:
        """Cached blocks that were given up for others so far."""
        return 0

    @abstractmethod
    def recount(self) -> tuple[int, int]:
        """Pool blocks in use on the GPU and on the host, counted sequence by sequence."""

    # -- whole sequences to the host and back, where `can_swap` ------------------------------------------------------

    host_reserved = 0
    """Host pool blocks set aside for the coming step that nobody holds yet."""

    caches_prefixes: bool = False
    """Whether prompts may hit blocks that others have computed."""

    def cached_tokens(self, seq: Sequence) -> int:
        """Tokens of a prompt that waits, from the first on, whose KV is there; never all of them."""
        return 0

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `seq` are computed, or are about to be: what they fill can be hit."""

    num_cached_on_host = 0
    """Host pool blocks of cached content, beside those that sequences hold."""

    unexecutable: ClassVar[str] = ""
    """Why a device cannot carry out its plans, and what to do about it; empty where one can."""

    def tell_blocks(self) -> None:
        """From now on, before anything runs, plans say which blocks are shared and cached (`plan.Share`), and whose
        states are saved (`plan.Save`)."""

    def name_blocks(self, seq: Sequence, keys: tuple[int, ...]) -> None:
        """The next blocks of `seq` are full, and these keys say with what: equal keys, equal content."""

    splits_layers: ClassVar[bool] = False
    """Whether a prompt may start with some of its layers on the host."""
    can_swap: ClassVar[bool] = False
    """Whether sequences can be swapped whole; else these methods are not called."""

    def can_swap_out(self, seq: Sequence) -> bool:
        """Whether the host has room for all that a sequence holds."""
        raise NotImplementedError

    can_receive: ClassVar[bool] = False
    """Whether KV can come from another engine; else `receive` is not called."""

    def fits_received(self, seq: Sequence, keep_free: int) -> bool:
        """`fits` for one whose KV comes from another engine."""
        return self.fits(seq, keep_free)

    def receive(self, seq: Sequence) -> int:
        """Take the blocks for the KV of a sequence that `fits_received` and whose last token is yet to be fed; returns
        how many of them have to come from the other engine."""
        raise NotImplementedError

    returns_kv: bool = False
    """Whether what sequences of other engines generate is sent back to them; else the next two are not called."""

    def returned(self, seq: Sequence) -> None:
        """What `seq`, which came from another engine and has ended, generated has been sent back."""
        raise NotImplementedError

    def insert(self, seq: Sequence) -> None:
        """Another engine has sent back KV of `seq`, which holds nothing here: cache what is new of it."""
        raise NotImplementedError

    def swap_out(self, seq: Sequence, plan: IterationPlan) -> None:
        """Copy a sequence to the host before the computation; its GPU blocks are free at once."""
        raise NotImplementedError

    def can_swap_in(self, seq: Sequence, keep_free: int) -> bool:
        """Whether a swapped sequence fits with one block to spare, as vLLM asks."""
        raise NotImplementedError

    def swap_in(self, seq: Sequence, plan: IterationPlan) -> None:
        """Copy a swapped sequence back before the computation."""
        raise NotImplementedError

    def outgrew_gpu(self, seq: Sequence) -> bool:
        """Whether a swapped sequence can never come back, not even alone."""
        raise NotImplementedError

    def drop_swapped(self, seq: Sequence) -> None:
        """Give back the host blocks of a swapped sequence."""
        raise NotImplementedError

    def send_out(self, seq: Sequence, num_pieces: int = 1) -> None:
        """Start copying a sequence to the host beside the computation, in so many copies of its blocks (at most as
        many as there are), one after the other; the GPU blocks of each are free when it has ended."""
        raise NotImplementedError

    def bring_in(self, seq: Sequence) -> int:
        """Start copying what a sequence has on the host back; GPU pool blocks taken for it."""
        raise NotImplementedError

    # -- copies beside and behind the computation, where there are any -----------------------------------------------

    copies_of: dict[Sequence, int]
    """Copies under way by sequence; nobody listed has none."""
    releasing: int
    """GPU pool blocks that they will free."""

    def transfer_done(self, move: Move) -> None:
        """A copy beside or behind the computation has ended: what it left is free."""
        raise NotImplementedError


class Admission(Part, ABC):
    """Whether the head of the queue may start."""

    keep_free = 0
    """Whole blocks that stay free when a prompt is placed or a swapped sequence returns."""

    @abstractmethod
    def admits(self, seq: Sequence) -> bool:
        """Whether `seq` may start now. Where it refuses for longer than `holds` says, only memory may change that."""

    @property
    def refused_for_slo(self) -> bool:
        """Whether a prompt was refused in this step for the sake of others' SLOs. For reports."""
        return False

    @property
    def reason(self) -> str:
        """What the answers of this step hung on besides memory, in words; empty where that is all. For timelines."""
        return ""

    def delays(self, seq: Sequence) -> bool:
        """Whether `admits` refuses `seq` now whatever blocks there are."""
        return False

    def admitted(self, seq: Sequence) -> None:
        """`seq` starts."""


class Eviction(Part, ABC):
    """Where a victim's KV goes, and how it comes back."""

    moves_whole: ClassVar[bool] = False
    """Whether sequences go to the host whole."""

    @abstractmethod
    def evict(self, seq: Sequence, plan: IterationPlan) -> None:
        """Take the blocks of a running sequence, which is in no queue and no batch any more."""

    @property
    def has_victims(self) -> bool:
        """Whether this step has taken anybody's blocks."""
        return False

    def settle(self) -> bool:
        """The running sequences are through: put this step's victims in their queues; whether there were any."""
        return False

    def may_admit(self) -> bool:
        """Whether new prompts may start, as far as the room for victims goes."""
        return True

    def headroom(self) -> int:
        """GPU pool blocks to leave free beside a new prompt, so that it is not offloaded again at once."""
        return 0

    def bring_back(self, plan: IterationPlan, budget: int, num_seqs: int) -> None:
        """Let victims compute again, within the token budget and the seats left."""

    def room(self) -> float:
        """Pool blocks for which there is room where victims go: more are taken only if decodes cannot go on."""
        return inf

    def is_out(self, seq: Sequence) -> bool:
        """Whether `seq` waits on the host to be called back, and no copy of it is under way."""
        return False

    def call_back(self, seq: Sequence) -> None:
        """Start the return of `seq`, which `is_out` and for which there are blocks."""
        raise NotImplementedError

    def unblock(self) -> bool:
        """Nothing can be computed: give up or recompute who would wait for ever; whether that changed anything."""
        return False

    @property
    def num_out(self) -> int:
        """Sequences whose KV is away and that wait to return."""
        return 0


class Stage(Part, ABC):
    """What happens between prefill and decode."""

    @abstractmethod
    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        """`seq` has its first token (or the next one after a recomputation) and is not complete."""

    brings_layers_back: ClassVar[bool] = False
    """Whether sequences with layers on the host may enter."""
    streams: ClassVar[bool] = False
    """Whether sequences may decode with layers on the host, which pass through the GPU."""

    hands_over: ClassVar[bool] = False
    """Whether prefilled sequences leave for another engine: they stand in `prefilled` until that is told."""
    pulls: ClassVar[bool] = False
    """Whether sequences that were prefilled elsewhere can be offered."""
    layer_wise = False
    """Whether the KV of a prompt's layers leaves while later ones are computed."""
    prefilled: list[Sequence]
    blocking = False
    """Whether nothing is computed while KV is pulled."""

    def offer(self, seq: Sequence) -> None:
        """Another engine has prefilled `seq` and holds its KV."""
        raise NotImplementedError

    def migrated(self, move: Move) -> None:
        """A copy to or from another engine has ended."""
        raise NotImplementedError

    @property
    def has_parked(self) -> bool:
        """Whether somebody waits for memory between prefill and decode, who should not be passed."""
        return False

    @property
    def num_parked(self) -> int:
        """Sequences with their first token that do not decode."""
        return 0

    @property
    def num_returning(self) -> int:
        """Of those, who is on the way back to the batch: each has a seat."""
        return 0


def overrides(part: Part, hook: str, kind: type[Part] = Part) -> bool:
    """Whether a part has a hook of its own, where `kind` has one that does nothing."""
    return getattr(type(part), hook) is not getattr(kind, hook)
