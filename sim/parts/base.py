"""The contracts of the parts; memory has its in `sim.kv.memory`.

A scheduler (`sim.engine.scheduler`) is six parts and what they share.

One step of the scheduler asks them in this order:

1. `prepare(now_s)` of every part that has one: bring sequences back, offload ahead of need, age the queue. Then
   `reserve()`: take what the coming step needs on top of what the batching will ask for.
2. `Batching.fill(plan, now_s)`: the shape of the iteration. It asks `Order.head` and `Admission.admits` which
   request may start, `Memory` for blocks, and `Eviction.evict` to take a victim's. `Unified` and `Sglang` ask no
   admission: they admit by memory, by a rule of their own, and refuse admissions that weigh more.
3. `repeats(plan, steps)` of every part that has one, where the plan could repeat itself: for how many iterations the
   answers just given stay the same. The scheduler takes the least.
4. `complete(plan)` of every part that has one: what else is copied.
5. After the iteration: `committed(plan, times)`; of one scheduled ahead `delivered()`, `committed` when it is launched.
   As it happens: `joined` (a sequence enters the decode batch), `parked` (it has its first token and waits outside),
   `moved` (it got a token more than the batch), `left` (it ended, or is to be computed again), `transferred` (a copy
   has ended). `wakes_s` is asked where nothing can be done, and before a jump.

Questions (`admits`, `fits`, properties, `is_`, `has_`, `may_` and so on) change nothing: a checked engine asks them
twice (`kvtwin.testing.questions`). What only remembers an answer, a class names in `memoized`.

Only `Memory` touches the pools. A hook that a part does not override is never called.

A part's class says what is known before there is one: `name`, as `composition` and `--policy SYSTEM:KIND=NAME` have it;
`options`, the dataclass of options that it reads; `needs`, what the parts of other kinds must be or offer for its sake,
each with the reason that a refusal gives; and `build`, a class method that makes one for an engine. `--policy`,
refusals and tables of what goes together are derived from these. `sim.parts.catalogue` says where a name's class is.

- A need asks for what another part offers: a capability (a class that it derives from) or a class attribute that is
  true. It asks for a name only where that part alone makes sense. Needs are those of the parts that were built.
- One name may stand for several classes: the `build` of the class in the catalogue chooses, by limits and options. It
  finds the others by their places (`class_at`), imports no subclass, and all bear one name. Two names for one algorithm
  are two classes, one a subclass of two lines.
- `build` gives options and constants. Other parts are met in `bind`, when needs have been checked.
- Options that several parts or presets have are a dataclass in a module of its own (`NAME_options.py`, or `options.py`
  in a family's folder), so that a preset, which derives from it, imports no part.
- Parts that go only with one another are a folder with their preset, `sim/systems/NAME/`.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal

from sim.engine.batch import DecodeBatch
from sim.engine.changes import Move, Tier
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.kv.memory import Memory
    from sim.parts.needs import Need
    from sim.systems.builder import Builder


Wait = Literal["memory", "seat", "tool", "link"]
"""What a sequence waits for that has begun and is in no batch: KV memory, a seat (`max_num_seqs`), a tool's answer, KV
that is on its way over a link."""


class Part:
    """What all parts have: what their class says, the scheduler that they serve, hooks into its step (see above)."""

    name: ClassVar[str]
    """As `--policy SYSTEM:KIND=NAME` speaks of it."""
    options: ClassVar[type | None] = None
    """The dataclass of options that it reads."""
    needs: "ClassVar[tuple[Need, ...]]" = ()
    """What parts of other kinds must be or offer."""

    @classmethod
    def build(cls, b: "Builder") -> "Part":
        """A new one for an engine. UserError where the deployment or an option speaks against it."""
        return cls()

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

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """For how many iterations like `plan`, 1 to `steps`, this part's answers stay what they are.

        A part that knows a time instead may lower `plan.until_s`. Arrivals are the order's business: where `sticky`, a
        jump runs through them if a request waits.
        """
        return steps

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        """The plan was carried out; sequences that ended with it are gone from `plan.decodes`."""

    def delivered(self) -> None:
        """Of the plans that are committed ahead the oldest was carried out; sequences that ended with it have left."""

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

    def wakes_s(self) -> float:
        """When it has something to decide though nothing may have happened, s; infinite where it knows of no such time.

        An engine without work is asked again then, and a jump ends at the first boundary at or after it.
        """
        return inf

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        """Sequences that are in this part's care and hold blocks, and where. For recounts."""
        return ()


class Order(Part, ABC):
    """Which waiting request is next."""

    sticky: ClassVar[bool]
    """Whether no arrival can overtake a head that was refused."""
    follows_all: ClassVar[bool] = False
    """Whether it keeps something of each sequence that runs, and so must have met it in its queue."""
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
        """The next; at least one must wait."""

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


class Admission(Part, ABC):
    """Whether the head of the queue may start."""

    by_memory_alone: ClassVar[bool] = False
    """Whether it weighs memory alone, so that a batching with a rule of its own keeps `keep_free` and need not ask."""
    keep_free = 0
    """Whole blocks that stay free when a prompt is placed or a swapped sequence returns."""

    @abstractmethod
    def admits(self, seq: Sequence) -> bool:
        """Whether `seq` may start now. Where it refuses for longer than `repeats`, only memory may change that."""

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

    def delayed(self, seq: Sequence) -> None:
        """`seq`, which it `delays`, waits on."""


class Eviction(Part, ABC):
    """Where a victim's KV goes, and how it comes back."""

    moves_whole: ClassVar[bool] = False
    """Whether sequences go to the host whole."""
    returns_when_asked: ClassVar[bool] = False
    """Whether victims come back only when the batching asks (`bring_back`)."""

    @abstractmethod
    def evict(self, seq: Sequence, plan: IterationPlan) -> None:
        """Take the blocks of a running sequence, which is in no queue and no batch any more."""

    @property
    def has_victims(self) -> bool:
        """Whether this step has taken a running sequence's blocks."""
        return False

    def requeue_victims(self) -> bool:
        """All that run have been visited: put this step's victims in their queues; whether there were any."""
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
        """Nothing can be computed: give up or recompute what would wait for ever; whether that changed anything."""
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
    pulls_within_steps: ClassVar[bool] = False
    """Whether batching seats those in `landed` and has the next ones pulled, as requests that wait."""
    landed: deque[Sequence]
    takes_calls: ClassVar[bool] = False
    """Whether sequences may call tools."""
    drafts: ClassVar[bool] = False
    """Whether tokens of sequences that decode are drafted: they may take several in an iteration (`plan.taken`)."""
    layer_wise = False
    """Whether the KV of a prompt's layers leaves while later ones are computed."""
    prefilled: list[Sequence]
    blocking = False
    """Whether nothing is computed while KV is pulled."""

    def offer(self, seq: Sequence) -> None:
        """Another engine has prefilled `seq` and holds its KV."""
        raise NotImplementedError

    def pull(self, keep_free: int) -> None:
        """Pull what is offered, in order, as long as that leaves so many blocks free."""
        raise NotImplementedError

    def continued(self, seq: Sequence) -> Sequence:
        """`seq`, prefilled here, as the engine knows it that goes on with it: no blocks yet."""
        raise NotImplementedError

    def migrated(self, move: Move) -> None:
        """A copy to or from another engine has ended."""
        raise NotImplementedError

    def call(self, seq: Sequence) -> None:
        """`seq`, in no batch, calls the first of its `calls`, and did so with its last token (`last_token_s`).

        It has its KV, unless it waits: it was preempted with that token in flight.
        """
        raise NotImplementedError

    @property
    def waits_for(self) -> Wait | None:
        """What a sequence that is parked here waits for, of several one that waits for this engine; None where none is
        this engine's."""
        if self.hands_over or not self.num_parked:
            return None
        return "memory" if self.num_parked > self.num_returning else "link"

    @property
    def num_pulling(self) -> int:
        """Sequences that wait for their KV from another engine, or with it, as requests of this engine do."""
        return 0

    @property
    def num_calling(self) -> int:
        """Of those parked, the ones with a tool or back from it and not on the way to the batch: none has a seat."""
        return 0

    @property
    def has_parked(self) -> bool:
        """Whether a sequence waits for memory between prefill and decode that should not be passed."""
        return False

    @property
    def num_parked(self) -> int:
        """Sequences with their first token that do not decode."""
        return 0

    @property
    def num_returning(self) -> int:
        """Of those, the ones on the way back to the batch: each has a seat."""
        return 0


def overrides(part: Part, hook: str, kind: type[Part] = Part) -> bool:
    """Whether a part has a hook of its own, where `kind` has one that does nothing."""
    return getattr(type(part), hook) is not getattr(kind, hook)
