"""`LayerBlocks`: blocks of one layer, so that a prompt may start with some of its layers on the host (LayerKV 3.1.2).

The layers that do not stay leave behind the prefill, through a send buffer of two layers. Later, retained layers can be
copied out and missing ones back in, beside the computation. `copies_of` has whose copy is under way: one at a time.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import GPU, HOST, Move, Place, Release, Streamed, Tier
from sim.engine.layers import SEND_BUFFER_LAYERS, offloaded_layers, other_layers, retained_layers, split_evenly
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan, PrefillChunk
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.kv.memory import Memory
from sim.parts.needs import Need
from sim.systems.layerkv.equations import Equations
from sim.systems.layerkv.preset import LayerKVOptions

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class LayerBlocks(Memory):
    """Layer-blocks: any of them serves any layer of any sequence.

    Args:
        limits: of the engine, in whole blocks.
        num_layers: of the model.
        minimum_layers: Eq. 4's x for a prompt of so many tokens.
    """

    name: ClassVar[str] = "layers"
    options: ClassVar[type | None] = LayerKVOptions
    needs: ClassVar[tuple[Need, ...]] = (Need("stage", "leaves layers on the host", offers="brings_layers_back"),)
    takes_chunks: ClassVar[bool] = False
    can_receive: ClassVar[bool] = False
    memoized = ("_minimum_layers",)

    @classmethod
    def build(cls, b: "Builder") -> "LayerBlocks":
        model = b.deployment.model
        if model.num_stored_layers < model.num_layers:
            raise UserError(
                f"memory=layers keeps each layer's KV apart, and layers of {model.name} share theirs: use memory=paged"
            )
        return cls(b.limits, model.num_layers, Equations.of(b).minimum_layers)

    def __init__(self, limits: Limits, num_layers: int, minimum_layers: Callable[[int], int]) -> None:
        super().__init__(limits, num_layers)
        self.minimum_layers = minimum_layers
        self._minimum_layers: dict[int, int] = {}
        """By tokens: prompts of one length come again and again."""
        self.all_groups = tuple(range(num_layers))
        self._leaving = [offloaded_layers(num_layers, kept) for kept in range(num_layers + 1)]
        """Layers that leave behind a prefill, by how many stay."""
        self.groups_on_gpu: dict[Sequence, tuple[int, ...]] = {}
        """Of every sequence that holds blocks."""
        self.arriving: dict[Sequence, None] = {}
        """Sequences whose missing layers are on their way back: held on both sides until they are there."""
        self.host_reserved = 0
        """Layer-blocks on the host that decodes with hosted layers may grow into during the coming step."""

    def held_blocks(self, seq: Sequence) -> int:
        return len(self.groups_on_gpu[seq]) * seq.num_blocks

    def num_hosted(self, seq: Sequence) -> int:
        """Layers of `seq` that are on the host."""
        return self.num_groups - len(self.groups_on_gpu[seq])

    # -- prompts ---------------------------------------------------------------------------------------------------

    def ever_fits(self, seq: Sequence, keep_free: int) -> bool:
        return self.limits.num_gpu_blocks - -(-seq.num_tokens // self.block_size) >= keep_free

    def fits(self, seq: Sequence, keep_free: int) -> bool:
        return self.layers_to_keep(seq, keep_free) is not None and self.ever_fits(seq, keep_free)

    def layers_to_keep(self, seq: Sequence, keep_free: int) -> int | None:
        """As many layers as memory has to spare, at least Eq. 4's x; None if not even those fit now."""
        layers, free = self.num_groups, self.gpu.free
        blocks = -(-seq.num_tokens // self.block_size)
        most = (free - keep_free * layers) // blocks
        # Beside layers that leave, their send buffer has to fit.
        most = layers if most >= layers else most - SEND_BUFFER_LAYERS
        kept = self._minimum_layers.get(seq.num_tokens, -1)
        if kept < 0:
            kept = self._minimum_layers[seq.num_tokens] = self.minimum_layers(seq.num_tokens)
        if kept > most:
            return None
        if not self.scheduler.stage.has_parked:
            spare = (free - self.scheduler.eviction.headroom()) // blocks
            kept = max(kept, min(spare, most))
        if (layers - kept) * blocks <= self.host.free:
            return kept
        # A full host leaves only the GPU, all of it.
        return layers if most == layers else None

    def place(self, seq: Sequence, num_tokens: int) -> None:
        kept = self.layers_to_keep(seq, self.scheduler.admission.keep_free)
        assert kept is not None, "ask first whether it fits"
        layers = self.num_groups
        blocks = seq.num_blocks = -(-seq.num_tokens // self.block_size)
        buffer = min(SEND_BUFFER_LAYERS, layers - kept)
        groups = self.groups_on_gpu[seq] = retained_layers(layers, kept) if kept < layers else self.all_groups
        self.gpu.allocate((kept + buffer) * blocks)
        self.scheduler.changes.append(Place(seq, groups, blocks, buffer))
        if kept < layers:
            self.host.allocate((layers - kept) * blocks)
            tally = self.scheduler.counters.policy
            tally["offloaded_at_prefill_layer_blocks"] += (layers - kept) * blocks
            tally["prefills_offloaded"] += 1

    def complete(self, plan: IterationPlan) -> None:
        groups, layers = self.groups_on_gpu, self.num_groups
        for chunk in plan.chunks:
            kept = len(groups[chunk.seq])
            if kept < layers:
                self._offload_behind_prefill(plan, chunk, kept)

    def _offload_behind_prefill(self, plan: IterationPlan, chunk: PrefillChunk, kept: int) -> None:
        """Copies of one prefill chunk: its own KV out, and back in what earlier chunks left on the host."""
        seq, num_new, cached = chunk.seq, chunk.num_new, chunk.num_cached
        layers, size, end = self.num_groups - kept, self.block_size, cached + num_new
        # Whole blocks travel, also one that an earlier chunk has begun.
        moved = layers * (-(-end // size) - cached // size)
        is_last = end == seq.num_tokens
        # The end of the last chunk's copies frees the send buffer.
        freed = min(SEND_BUFFER_LAYERS, layers) * seq.num_blocks if is_last else 0
        if is_last:
            self._note_copy(seq, freed)
        plan.behind += (Move(seq, self._leaving[kept], cached, end, GPU, HOST, moved, freed, is_last),)
        plan.behind_blocks += moved
        if layers > plan.behind_groups:
            plan.behind_groups = layers
        if cached:
            plan.streamed += (Streamed(layers, layers * -(-cached // size), 0),)

    def _note_copy(self, seq: Sequence, freed: int) -> None:
        self.copies_of[seq] = 1
        self.releasing += freed

    # -- decodes ---------------------------------------------------------------------------------------------------

    def grow_hosted(self, layer_blocks: int) -> None:
        """Of what `append` or `grow` took on the GPU, so many lie in the host blocks set aside for them."""
        self.gpu.release(layer_blocks)
        self.host_reserved -= layer_blocks

    def release(self, seq: Sequence) -> None:
        """Also the send buffer of a half-done prefill."""
        groups = self.groups_on_gpu.pop(seq)
        missing = self.num_groups - len(groups)
        buffer = min(SEND_BUFFER_LAYERS, missing) if seq.prefilling else 0
        self.gpu.release((len(groups) + buffer) * seq.num_blocks)
        if missing:
            self.host.release(missing * seq.num_blocks)
        seq.num_blocks = 0
        self.scheduler.changes.append(Release(seq))

    # -- layers out and in -------------------------------------------------------------------------------------------

    def offload(self, seq: Sequence, layers: int) -> int:
        """Start copying `layers` retained layers to the host; layer-blocks that will be freed, 0 where it is full."""
        blocks = layers * seq.num_blocks
        if blocks > self.host.free:
            return 0
        self.host.allocate(blocks)
        groups = self.groups_on_gpu[seq]
        staying, leaving = split_evenly(groups, len(groups) - layers)
        self.groups_on_gpu[seq] = staying
        self._note_copy(seq, blocks)
        self.scheduler.beside.append(self._whole(seq, leaving, GPU, HOST, blocks, blocks))
        return blocks

    def offload_now(self, seq: Sequence, plan: IterationPlan) -> None:
        """Copy all layers of a sequence to the host before the computation; its GPU blocks are free at once."""
        groups, blocks = self.groups_on_gpu[seq], len(self.groups_on_gpu[seq]) * seq.num_blocks
        self.gpu.release(blocks)
        self.host.allocate(blocks)
        self.groups_on_gpu[seq] = ()
        self.scheduler.changes.append(self._whole(seq, groups, GPU, HOST, blocks, 0, is_reported=False))
        plan.swapped_out_blocks += blocks
        self.scheduler.counters.swap_out_blocks += seq.num_blocks

    def bring_in(self, seq: Sequence) -> int:
        missing = other_layers(self.num_groups, self.groups_on_gpu[seq])
        self.arriving[seq] = None
        blocks = len(missing) * seq.num_blocks
        self.gpu.allocate(blocks)
        self._note_copy(seq, 0)
        self.scheduler.beside.append(self._whole(seq, missing, HOST, GPU, blocks, 0))
        return blocks

    def _whole(
        self, seq: Sequence, groups: tuple[int, ...], source: Tier, target: Tier, blocks: int, freed: int, *,
        is_reported: bool = True,
    ) -> Move:  # fmt: skip
        return Move(seq, groups, 0, seq.num_blocks * self.block_size, source, target, blocks, freed, is_reported)

    def transfer_done(self, move: Move) -> None:
        seq = move.seq
        del self.copies_of[seq]
        if move.target is HOST:
            self.releasing -= move.num_freed
            self.gpu.release(move.num_freed)
        else:
            del self.arriving[seq]
            self.host.release(move.num_blocks)
            self.groups_on_gpu[seq] = self.all_groups

    # -- decodes with layers on the host -------------------------------------------------------------------------------

    def reserve_on_host(self, wanted: int) -> bool:
        """Set aside host layer-blocks for the coming step, instead of what was set aside before; False if too few."""
        self.host.release(self.host_reserved)
        self.host_reserved = 0
        if wanted > self.host.free:
            return False
        self.host.allocate(wanted)
        self.host_reserved = wanted
        return True

    def recount(self) -> tuple[int, int]:
        batch, layers = self.batch, self.num_groups
        gpu, host = self.releasing, self.host_reserved
        held = [(seq, -(-(batch.num_tokens_of(seq) - 1) // self.block_size)) for seq in batch.members]
        held += [(seq, seq.num_blocks) for seq, _ in self.scheduler.holders()]
        for seq, blocks in held:
            kept = len(self.groups_on_gpu[seq])
            gpu += kept * blocks
            host += (layers - kept) * blocks
            if seq.prefilling:
                gpu += min(SEND_BUFFER_LAYERS, layers - kept) * blocks
            if seq in self.arriving:
                gpu += (layers - kept) * blocks
        return gpu, host
