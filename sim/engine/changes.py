"""What a plan says of KV: where blocks lie, what becomes of them (`Change`), and what passes between the layers."""

from enum import Enum

import msgspec

from sim.engine.sequence import Sequence


class Tier(Enum):
    """Where KV blocks lie."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"
    PEER = "peer"
    """On another engine, over a link between the two."""


class Direction(Enum):
    """Which way a copy goes over PCIe."""

    D2H = "d2h"
    H2D = "h2d"


# For the hot path: CPython 3.11 takes ten times as long to find a member of an enumeration as a name of a module.
GPU, HOST, DISK, PEER = Tier.GPU, Tier.HOST, Tier.DISK, Tier.PEER
D2H, H2D = Direction.D2H, Direction.H2D


class Place(msgspec.Struct, frozen=True, gc=False):
    """`num_blocks` blocks in each layer group for `seq`: on the GPU for `gpu_groups`, on the host for the others.

    `num_buffers` more lots of as many GPU blocks are the send buffer through which the host's groups are written.
    """

    seq: Sequence
    gpu_groups: tuple[int, ...]
    num_blocks: int
    num_buffers: int


class Release(msgspec.Struct, frozen=True, gc=False):
    """All blocks of `seq` are given back, but for those that copies under way still read."""

    seq: Sequence


class Append(msgspec.Struct, frozen=True, gc=False):
    """`seq` has `num_tokens` more tokens of context that it did not generate, behind those that it has."""

    seq: Sequence
    num_tokens: int


class Grow(msgspec.Struct, frozen=True, gc=False):
    """`seq`, which has all its KV on the GPU, has `num_blocks` blocks in each layer group from now on."""

    seq: Sequence
    num_blocks: int


class Keep(msgspec.Struct, frozen=True, gc=False):
    """`num_blocks` blocks of `seq` from `first_block` on are cached from now on, at the end of `run`.

    Memory says so, and what follows, once it is asked to (`Memory.tell_blocks`).
    """

    seq: Sequence
    first_block: int
    num_blocks: int
    run: object


class Hit(msgspec.Struct, frozen=True, gc=False):
    """`num_blocks` blocks of `seq` from `first_block` on are those of a cached `run`, which stays cached.

    `seq` is about to be placed, or has blocks of the same content there, which give way.
    """

    seq: Sequence
    first_block: int
    num_blocks: int
    run: object


class Split(msgspec.Struct, frozen=True, gc=False):
    """The first `num_blocks` blocks of a cached `run` are a run of their own, `first`."""

    run: object
    first: object
    num_blocks: int


class Evict(msgspec.Struct, frozen=True, gc=False):
    """Of a cached `run` that no sequence holds the first `num_left` blocks are left; the others are free."""

    run: object
    num_left: int


class Save(msgspec.Struct, frozen=True, gc=False):
    """The host keeps the states of `seq` from now on (HCache), in as many blocks as `seq` has on the GPU.

    Memory says so, and `Unsave`, once it is asked to (`Memory.tell_blocks`).
    """

    seq: Sequence


class Unsave(msgspec.Struct, frozen=True, gc=False):
    """The host keeps the states of `seq`, which runs, no longer."""

    seq: Sequence


class Store(msgspec.Struct, frozen=True, gc=False):
    """The host's cache gives blocks to `keys`; a `Move` of `seq` beside this plan fills them from its `places`.

    `runs`, where there are any, are cached runs of a block each that it fills them from instead.
    """

    seq: Sequence
    places: tuple[int, ...]
    keys: tuple[int, ...]
    runs: tuple[object, ...] = ()


class Load(msgspec.Struct, frozen=True, gc=False):
    """The blocks of `seq` from `first_block` on are those of `keys` in the host's cache.

    They come layer by layer while this plan is computed (`IterationPlan.streamed` counts them).
    """

    seq: Sequence
    first_block: int
    keys: tuple[int, ...]


class Drop(msgspec.Struct, frozen=True, gc=False):
    """The host's cache gives up the blocks of `keys`."""

    keys: tuple[int, ...]


class Move(msgspec.Struct, frozen=True, gc=False):
    """A copy of the KV of tokens [`first_token`, `end_token`) of `seq` in some layer groups, from tier to tier.

    What a block holds of the layers is a layer group: the whole model for vLLM, one layer for LayerKV. `num_blocks` is
    the pool blocks copied. Where `is_reported`, the instance says at the first iteration boundary after the copy that
    it has ended; then `num_freed` blocks of the source are free.
    """

    seq: Sequence
    groups: tuple[int, ...]
    first_token: int
    end_token: int
    source: Tier
    target: Tier
    num_blocks: int
    num_freed: int
    is_reported: bool
    s_per_block: float | None = None
    """What a block takes where an option says so, s; None: as the machine's constants say."""

    @property
    def direction(self) -> Direction:
        """Which way the copy goes, if over PCIe."""
        return D2H if self.target is HOST else H2D

    @property
    def uses_disk(self) -> bool:
        """Whether it goes between host and disk."""
        return self.source is DISK or self.target is DISK


class Restore(msgspec.Struct, frozen=True, gc=False):
    """Bring back the KV of `num_tokens` tokens of `seq` before it computes, each layer group in one of three ways.

    `hidden_groups` are projected from saved hidden states, `kv_groups` copied, `recomputed_groups` computed again
    (HCache's mixes; vLLM's swap-in has `kv_groups` only, of `num_blocks` pool blocks in all). Where it computes, groups
    are layers, and `num_blocks` counts blocks of one layer.
    """

    seq: Sequence
    num_tokens: int
    hidden_groups: tuple[int, ...]
    kv_groups: tuple[int, ...]
    recomputed_groups: tuple[int, ...]
    num_blocks: int

    @property
    def computes(self) -> bool:
        """Whether it does more than copy KV."""
        return bool(self.hidden_groups or self.recomputed_groups)


class Streamed(msgspec.Struct, frozen=True, gc=False):
    """Layer groups that pass through the GPU during the computation, summed over the sequences that have as many.

    For each of `num_groups` groups come in the blocks of the tokens that are cached (`num_read` pool blocks in all) and
    go out those that decodes write to (`num_written`; what prefills write is in `IterationPlan.behind`).
    """

    num_groups: int
    num_read: int
    num_written: int


class Gathered(msgspec.Struct, frozen=True, gc=False):
    """As `Streamed`, by kernels that copy at the link's rate, however small the blocks: each takes `s_per_block`, s.

    Of the plan's `awaited` copies it begins after the first `after`: the computation waits for others beside it.
    """

    num_groups: int
    num_read: int
    num_written: int
    s_per_block: float
    after: int = 0


class Projected(msgspec.Struct, frozen=True, gc=False):
    """As `Streamed`, but the KV of `num_tokens` tokens (of all such sequences) is made from their inputs to the layers.

    The inputs come in first; the KV of the other tokens, `num_read` pool blocks, follows as they are projected (KVPR).
    """

    num_groups: int
    num_read: int
    num_written: int
    num_tokens: int
    num_inputs: int
    """Of `num_written`, what the new tokens' inputs take."""


class Uncache(msgspec.Struct, frozen=True, gc=False):
    """The first `num_tokens` tokens of `seq`, whole blocks, have no GPU blocks from now on; those after them do (eLLM).

    Their KV passes through `num_scratch` lots of as many GPU blocks. The host keeps it in `groups`, the last ones, and
    for this `num_blocks` pool blocks are copied there from the GPU. KV that is on no GPU yet is there after the next
    pass (`Rebuilt`), and comes from blocks that the host keeps until then. Said before a prompt's `Place`, too.
    """

    seq: Sequence
    num_tokens: int
    num_scratch: int
    groups: tuple[int, ...]
    num_blocks: int


class Rebuilt(msgspec.Struct, frozen=True, gc=False):
    """KV of decodes that is on no GPU before this pass: brought back between the layers, and not kept (eLLM).

    `tokens` says of how many of each sequence, its first. The `recomputed` layers of the model compute it again; for
    the others `num_read` pool blocks come from the host, and `num_written` go there as `after` says. `num_groups` is as
    in `Streamed`, 0.
    """

    num_groups: int
    num_read: int
    num_written: int
    tokens: tuple[tuple[Sequence, int], ...]
    recomputed: tuple[int, ...]
    fused_loss: float | None
    """By how much kernels that compute again and decode at once last longer for lack of threads; None: in turn."""
    overlapped: bool
    """Whether copies run beside the kernels."""
    after: tuple[Uncache, ...] = ()
    """Where the `recomputed` layers are the first, so that this can be executed: what is uncached after the pass."""


Change = (
    Place | Release | Append | Grow | Move | Restore | Keep | Hit | Split | Evict | Save | Unsave | Store | Load | Drop
    | Uncache
)  # fmt: skip
