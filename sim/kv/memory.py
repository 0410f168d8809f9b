"""`Memory`: the contract of the part that has the KV, on the GPU and elsewhere."""

from abc import ABC, abstractmethod
from typing import ClassVar

from sim.engine.batch import DecodeBatch
from sim.engine.changes import Move
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.block_pool import BlockPool
from sim.parts.base import Part


class Memory(Part, ABC):
    """All pools, and what is where. `unit` pool blocks hold `block_size` tokens of the whole model.

    Holds Eq. 5's ledger: the pools' running totals. `recount` is for tests: what the pools should say, counted from the
    sequences.
    """

    can_cache_prefixes: ClassVar[bool] = False
    """Whether prompts may hit blocks that others have computed, where a run asks for it."""
    always_caches: ClassVar[bool] = False
    """Whether there is no choice about that."""
    runs_live: ClassVar[bool] = True
    """Whether a device can carry out its plans, which say where prefixes are cached which blocks are shared."""
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

    def look_up(self, seq: Sequence) -> None:
        """Find what a prompt that waits would hit by now: before it is asked about, where `caches_prefixes`."""

    def cached_tokens(self, seq: Sequence) -> int:
        """Tokens of a prompt that was looked up, from the first on, whose KV is there; never all of them."""
        return 0

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `seq` are computed, or are about to be: what they fill can be hit."""

    num_cached_on_host = 0
    """Host pool blocks of cached content, beside those that sequences hold."""

    unexecutable: ClassVar[str] = ""
    """Why a device cannot carry out its plans, and what to do about it; empty where one can."""

    def tell_blocks(self) -> None:
        """From now on, before anything runs, plans say which blocks are shared and cached (`changes.Keep`), and whose
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

    def look_up_received(self, seq: Sequence) -> None:
        """`look_up` for one whose KV comes from another engine, before `fits_received`."""

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
