"""`Memory`: the contract of the part that has the KV, chunk by chunk, and what a memory may offer beyond it.

A prompt that waits is looked up (`look_up`), asked about, and placed with its first chunk, which may be all of it. Then
it takes blocks chunk by chunk (`take_chunk`) and, once it decodes, token by token: with the whole batch by counts
(`grow`), or by itself (`append`, `take_next`). Questions change nothing.

Defaults are those of blocks on demand, `unit` of them for `block_size` tokens, which span all layers between them. What
not every memory offers is a class of its own, a capability: `Swaps`, `ReturnsKV`; or an attribute of the class.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

from sim.engine.batch import DecodeBatch
from sim.engine.changes import Move, Place, Release, Tier
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import PARKED, Sequence
from sim.kv.block_pool import BlockPool
from sim.parts.base import Part

if TYPE_CHECKING:
    from sim.kv.backing import Backing
    from sim.systems.builder import Builder

ALL_LAYERS: Final = (0,)
"""The one layer group of memory whose blocks span the model."""


class MemoryKind(Part):
    """What the class says that a name in `memory=` stands for: a memory, or what is behind one (`sim.kv.backing`)."""

    can_cache_prefixes: ClassVar[bool] = False
    """Whether prompts may hit blocks that others have computed, where a run asks for it."""
    always_caches: ClassVar[bool] = False
    """Whether there is no choice about that."""
    unexecutable: ClassVar[str] = ""
    """Why a device cannot carry out its plans, and what to do about it; empty where one can."""
    in_pages: ClassVar[bool] = False
    """Whether a block is what pages of the driver hold."""
    caveat: ClassVar[str] = ""
    """What its results leave out, told with each run."""
    takes_chunks: ClassVar[bool] = True
    """Whether free GPU blocks alone decide if a prompt may start, so that a batching can weigh its first chunk."""
    reserves: ClassVar[bool] = False
    """Whether a prompt takes the blocks of all that it may ever generate."""
    can_receive: ClassVar[bool] = True
    """Whether KV can come from another engine; else `receive` is not called."""


class Memory(MemoryKind):
    """All pools, and what is where. `unit` pool blocks hold `block_size` tokens of the whole model.

    Holds Eq. 5's ledger: the pools' running totals. `recount` is for tests: what the pools should say, counted from the
    sequences. Blocks are pool blocks unless they are called whole.
    """

    caches_prefixes: bool = False
    """Whether prompts may hit blocks that others have computed."""
    backing: "Backing | None" = None
    """What is behind the GPU's cached blocks."""

    gpu: BlockPool
    host: BlockPool
    unit: int
    num_groups: int
    """Layer groups: 1 where a block spans the model, the layer count where it holds one layer."""
    copies_of: dict[Sequence, int]
    """Copies under way by sequence, of those that have any."""
    releasing: int
    """GPU blocks that copies under way will free."""
    host_reserved = 0
    """Host blocks set aside for the coming step that no sequence holds yet."""

    @classmethod
    def build(cls, b: "Builder") -> "Memory":
        return cls(b.limits)

    def __init__(self, limits: Limits, num_groups: int = 1) -> None:
        self.limits = limits
        self.block_size = limits.block_size
        self.unit = self.num_groups = num_groups
        self.gpu = BlockPool("GPU KV blocks", limits.num_gpu_blocks * num_groups)
        self.host = BlockPool("host KV blocks", limits.num_cpu_blocks * num_groups)
        self.copies_of = {}
        self.releasing = 0

    # -- what sequences hold -----------------------------------------------------------------------------------------

    def blocks_holding(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens of a sequence."""
        return -(-num_tokens // self.block_size) * self.unit

    def blocks_for(self, seq: Sequence) -> int:
        """Blocks of all tokens of a prompt, with what was generated before a recomputation."""
        return self.blocks_holding(seq.num_tokens)

    def held_blocks(self, seq: Sequence) -> int:
        """Blocks that a sequence holds between steps, wherever they are."""
        return self.unit * (self.batch.num_blocks_of(seq) if seq in self.batch.members else seq.num_blocks)

    def may_leave(self, seq: Sequence) -> bool:
        """Whether the blocks of a sequence are its own, so that it can be moved."""
        return True

    def outgrew_gpu(self, seq: Sequence) -> bool:
        """Whether the GPU could not hold a sequence and its next block, not even alone."""
        return self.gpu.num_blocks < self.held_blocks(seq) + self.unit

    def recount(self) -> tuple[int, int]:
        """Blocks in use on the GPU and on the host, counted sequence by sequence."""
        batch = self.batch
        gpu = sum(self.blocks_holding(batch.num_tokens_of(seq) - 1) for seq in batch.members)
        gpu += batch.num_blocks_ahead * self.unit
        host = 0
        for seq, tier in self.scheduler.holders():
            if tier is Tier.GPU:
                gpu += self.held_blocks(seq)
            else:
                host += self.held_blocks(seq)
        return gpu, host

    # -- prompts that wait -------------------------------------------------------------------------------------------

    def look_up(self, seq: Sequence, *, is_next: bool = True) -> None:
        """Find what a prompt that waits would hit by now: before it is asked about, where `caches_prefixes`.

        `is_next`: nothing else may keep it from starting, so that a jump ends where it may hit more.
        """

    def cached_tokens(self, seq: Sequence) -> int:
        """Tokens of a prompt that was looked up, from the first on, whose KV is there; never all of them."""
        return 0

    def cut_chunk(self, seq: Sequence, num_computed: int, num_new: int) -> int:
        """How many of the next `num_new` tokens of a prompt are computed in one step; 0: none in this one."""
        return num_new

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        """Free blocks that the first `num_tokens` tokens of a prompt that waits take."""
        return -(-num_tokens // self.block_size) * self.unit

    def blocks_to_admit(self, seq: Sequence, num_tokens: int, *, whole: bool) -> int:
        """Free blocks that must be there when a prompt starts with `num_tokens` tokens; `whole`: with room for all."""
        return self.blocks_wanted(seq, seq.num_tokens if whole else num_tokens)

    def ever_fits(self, seq: Sequence, keep_free: int) -> bool:
        """Whether an empty GPU could take the prompt and still have `keep_free` whole blocks left."""
        return self.gpu.num_blocks - self.blocks_for(seq) >= keep_free * self.unit

    def fits(self, seq: Sequence, keep_free: int) -> bool:
        """Whether the prompt has its blocks now (never unless `ever_fits`). A refusal lasts until blocks are freed."""
        return self.gpu.free - self.blocks_wanted(seq, seq.num_tokens) >= keep_free * self.unit

    # -- prompts that run --------------------------------------------------------------------------------------------

    def place(self, seq: Sequence, num_tokens: int) -> None:
        """Take the blocks of the first `num_tokens` tokens of a prompt that starts.

        What it hits counts as computed (`seq.num_computed`). Memory may take the whole prompt's at once.
        """
        self.take(seq, num_tokens)
        if self.caches_prefixes:
            self.count_hits(seq, seq.num_computed)

    def take(self, seq: Sequence, num_tokens: int) -> None:
        """The same of one that may not start yet: its hits are not counted."""
        seq.num_blocks = -(-num_tokens // self.block_size)
        blocks = self.blocks_wanted(seq, num_tokens)
        self.gpu.allocate(blocks)
        self.scheduler.changes.append(Place(seq, ALL_LAYERS, blocks, 0))

    def count_hits(self, seq: Sequence, num_tokens: int) -> None:
        """`seq` starts, or starts again, with `num_tokens` of its tokens computed."""
        counters = self.scheduler.counters
        if seq.first_scheduled_s < 0.0:
            seq.num_cached_tokens = num_tokens
            counters.prefix_query_tokens += seq.num_tokens
            counters.prefix_hit_tokens += num_tokens
        else:
            counters.prefix_rehit_tokens += num_tokens

    def blocks_missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that a half-done prompt lacks for its first `num_tokens` tokens; at most 0: none."""
        return (-(-num_tokens // self.block_size) - seq.num_blocks) * self.unit

    def take_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """Take them."""
        blocks = -(-num_tokens // self.block_size)
        if blocks > seq.num_blocks:
            self.gpu.allocate(self.blocks_missing(seq, num_tokens))
            seq.num_blocks = blocks

    def drop_unread(self, seq: Sequence) -> None:
        """`seq` is about to compute on: what it no longer reads is free."""

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `seq` are computed, or are about to be: what they fill can be hit."""

    # -- decodes -----------------------------------------------------------------------------------------------------

    def can_append(self) -> bool:
        """Whether one more sequence can take its next token, as vLLM asks: one block must be free, needed or not."""
        return self.gpu.free >= self.unit

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the next token of a sequence, in the batch or about to join, begins a block."""
        batch = self.batch
        tokens = batch.num_tokens_of(seq) if seq in batch.members else seq.num_tokens
        return (tokens - 1) % self.block_size == 0

    def decode_blocks(self) -> int:
        """Blocks that the next token of each in the batch takes, in all."""
        return self.unit * self.batch.blocks_needed(1)

    def decode_blocks_of(self, seq: Sequence) -> int:
        """Blocks that the next token of one of them takes."""
        return self.unit if self.batch.needs_block(seq) else 0

    def append(self, seq: Sequence) -> None:
        """Take them."""
        if self.batch.needs_block(seq):
            self.gpu.allocate(self.unit)

    def take_next(self, seq: Sequence) -> bool:
        """Take them if they are free, and say whether they were."""
        if self.decode_blocks_of(seq) > self.gpu.free:
            return False
        self.append(seq)
        return True

    def grow(self, batch: DecodeBatch, spare: int = 1) -> bool:
        """Take what the next iteration of the whole batch needs, by counts alone.

        False, and nothing is taken, where fewer than `spare` whole blocks would be left: vLLM wants one free for each
        sequence it visits, needed or not, so that the exact walk over single sequences (`append`) must decide then.
        """
        needed = self.decode_blocks()
        if self.gpu.free < needed + spare * self.unit:
            return False
        self.take_decodes(needed)
        return True

    def take_decodes(self, num_blocks: int) -> None:
        """Take what the next iteration of the whole batch needs, which are so many (`decode_blocks`) and free."""
        if num_blocks:
            self.gpu.allocate(num_blocks)

    def grow_further(self, batch: DecodeBatch, steps: int) -> None:
        """Take what iterations 2 to `steps` of the whole batch need."""
        self.gpu.allocate((batch.blocks_needed(steps) - batch.blocks_needed(1)) * self.unit)

    def catch_up(self) -> None:
        """From now on, not all that decode may do so in each step."""

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """As long as one whole block stays free: vLLM wants one for each sequence it visits, needed or not."""
        batch = self.batch
        # The first iteration's blocks are taken already.
        spare = self.gpu.free // self.unit + batch.blocks_needed(1) - 1
        if spare // len(batch.members) * batch.block_size < steps:
            return max(1, min(steps, batch.steps_within(spare)))
        return steps

    # -- the way out -------------------------------------------------------------------------------------------------

    def await_last_token(self, seq: Sequence) -> None:
        """`seq`, in no batch, is released when its last token comes."""

    def release(self, seq: Sequence) -> None:
        """Give back all that a sequence, which is not in the batch, holds."""
        self.gpu.release(self.held_blocks(seq))
        seq.num_blocks = 0
        self.scheduler.changes.append(Release(seq))

    def forget(self, seq: Sequence) -> None:
        """`seq`, which holds nothing, will not come back."""

    def transfer_done(self, move: Move) -> None:
        """A copy that this memory has begun, beside or behind the computation, has ended: what it left is free."""

    @property
    def num_evicted(self) -> int:
        """Cached blocks that were given up for others so far."""
        return 0

    # -- from other engines ------------------------------------------------------------------------------------------

    def has_left(self, seq: Sequence) -> bool:
        """Whether `seq`, which is released, has ended here: with its last token, or since another engine has its KV."""
        return seq.num_generated >= seq.output_tokens or (seq.status is PARKED and self.scheduler.stage.hands_over)

    def look_up_received(self, seq: Sequence) -> None:
        """`look_up` for one whose KV comes from another engine, before `fits_received`."""

    def fits_received(self, seq: Sequence, keep_free: int) -> bool:
        """`fits` for one whose KV comes from another engine: all of it is sent, whatever could be hit."""
        return self.gpu.free - self.blocks_for(seq) >= keep_free * self.unit

    def receive(self, seq: Sequence, num_tokens: int) -> int:
        """Take the blocks for the KV of the first tokens of a sequence that `fits_received`; returns how many of them
        have to come from the other engine."""
        blocks = seq.num_blocks = -(-num_tokens // self.block_size)
        self.gpu.allocate(self.blocks_holding(num_tokens))
        self.scheduler.changes.append(Place(seq, ALL_LAYERS, blocks, 0))
        return blocks

    @property
    def num_cached_on_host(self) -> int:
        """Host blocks of cached content, beside those that sequences hold."""
        return 0 if self.backing is None else self.backing.num_cached_on_host

    # -- told and asked where plans are executed ---------------------------------------------------------------------

    def tell_blocks(self) -> None:
        """From now on, before anything runs, plans say which blocks are shared and cached (`changes.Keep`), and whose
        states are saved (`plan.Save`)."""

    def name_blocks(self, seq: Sequence, keys: tuple[int, ...]) -> None:
        """The next blocks of `seq` are full, and these keys say with what: equal keys, equal content."""


class Swaps(ABC):
    """Of a memory: whole sequences, those that `may_leave`, go to the host and come back."""

    can_swap: ClassVar[bool] = True
    """Whether all of them may."""

    @abstractmethod
    def can_swap_out(self, seq: Sequence) -> bool:
        """Whether the host has room for all that a sequence holds."""

    @abstractmethod
    def swap_out(self, seq: Sequence, plan: IterationPlan) -> None:
        """Copy a sequence to the host before the computation; its GPU blocks are free at once."""

    @abstractmethod
    def can_swap_in(self, seq: Sequence, keep_free: int) -> bool:
        """Whether a swapped sequence fits with one whole block to spare, as vLLM asks."""

    @abstractmethod
    def swap_in(self, seq: Sequence, plan: IterationPlan) -> None:
        """Copy a swapped sequence back before the computation."""

    @abstractmethod
    def drop_swapped(self, seq: Sequence) -> None:
        """Give back the host blocks of a swapped sequence."""

    @abstractmethod
    def send_out(self, seq: Sequence, num_pieces: int = 1) -> None:
        """Start copying a sequence to the host beside the computation, in so many copies of its blocks (at most as
        many as there are), one after the other; the GPU blocks of each are free when it has ended."""

    @abstractmethod
    def bring_in(self, seq: Sequence) -> int:
        """Start copying what a sequence has on the host back; GPU blocks taken for it."""


class ReturnsKV(ABC):
    """Of a memory: what sequences of other engines generate can be sent back to them."""

    returns_kv: bool
    """Whether it is."""

    @abstractmethod
    def returned(self, seq: Sequence) -> None:
        """What `seq`, which came from another engine and has ended, generated has been sent back."""

    @abstractmethod
    def insert(self, seq: Sequence) -> None:
        """Another engine has sent back KV of `seq`, which holds nothing here: cache what is new of it."""
