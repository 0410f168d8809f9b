"""`DeviceMemory`: the KV blocks of one device on both tiers, their holders, and the copies between them."""

import torch

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyEngine
from gpu_runtime.kv.layer_places import Places, places_by_window
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.replay.placement import Placement
from gpu_runtime.kv.replay.state_placement import StatePlacement
from gpu_runtime.kv.replay.turn_placement import TurnPlacement
from gpu_runtime.kv.replay.uncached_placement import UncachedPlacement
from gpu_runtime.kv.replay.windowed_placement import WindowedPlacement
from gpu_runtime.layers.layer_inputs import LayerInputs
from gpu_runtime.layers.layer_pass import LayerPass
from gpu_runtime.layers.saved_states import LiveStates, TurnStates
from gpu_runtime.layers.uncached_tokens import UncachedTokens
from gpu_runtime.model.decoder import Decoder
from sim.engine.layers import SEND_BUFFER_LAYERS
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.errors import InvariantError, UserError
from sim.kv.hybrid import HybridMemory
from sim.parts.stage.speculative import Speculative
from sim.specs.kv_format import like_groups
from sim.systems.ellm.first_layers import FirstLayersAgain
from sim.systems.hcache.saved_states import SavedStates, TieredStates
from sim.systems.kvpr.partial_recompute import PartialRecompute


def scratch_blocks(scheduler: Scheduler) -> int:
    """GPU blocks beyond the scheduler's through which decodes with layers on the host pass.

    Each that may stream needs two layers' blocks, or one's where it has one layer on the host only.
    """
    if not scheduler.stage.streams:
        return 0
    limits = scheduler.limits
    longest = -(-limits.max_model_len // limits.block_size)
    # A sequence that streams holds all its blocks, here or there.
    whole = min(limits.num_gpu_blocks + limits.num_cpu_blocks, limits.max_num_seqs * longest)
    return min(SEND_BUFFER_LAYERS * whole, scheduler.host.num_blocks)


def check_executable(scheduler: Scheduler) -> None:
    """UserError for parts whose plans a device cannot carry out, and for drafts that none computes."""
    memory, stage = scheduler.memory, scheduler.stage
    reason = (memory.backing or memory).unexecutable or scheduler.batching.unexecutable
    if not reason and isinstance(memory, HybridMemory) and memory.caches_prefixes:
        reason = (
            "prefixes of layers with a window are not told to a device yet: give --no-enable-prefix-caching, or where "
            "other layers have none, --disable-hybrid-kv-cache-manager"
        )
    elif isinstance(stage, Speculative) and stage.method != "ngram":
        reason = (
            f"spec-method={stage.method}: a device computes no second model's drafts: give spec-method=ngram, or "
            "simulate"
        )
    if reason:
        raise UserError(reason)


class DeviceMemory:
    """As many blocks as a scheduler counts, of as many layers as its memory's blocks have.

    Args:
        decoder: whose KV it is.
        scheduler: of the engine, whose parts say how large the pools are, how many layers a block has and what else
            the host keeps; read, and asked to tell of cached blocks, else never changed.
        device: of the GPU's tier.
        dtype: of the KV.
        inline_copies: whether the computing thread copies, as it does on a CPU by default.
        spare_blocks: more GPU blocks, which no sequence is given.

    Raises:
        ValueError: the scheduler's layer groups do not divide the decoder's layers evenly.
        UserError: parts whose plans cannot be executed; drafts that are not computed.
    """

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler,
        device: torch.device,
        dtype: torch.dtype,
        *,
        inline_copies: bool | None = None,
        spare_blocks: int = 0,
    ) -> None:
        check_executable(scheduler)
        scheduler.memory.tell_blocks()
        self.decoder, self.scheduler, self.device = decoder, scheduler, device
        self.failures: list[tuple[Sequence, str]] = []
        """Whose KV is lost or could not be computed, and why."""
        config, memory, stage = decoder.config, scheduler.memory, scheduler.stage
        if isinstance(stage, Speculative):
            stage.acceptance = None
        block_tokens, window = scheduler.limits.block_size, scheduler.limits.window
        self.has_windows = isinstance(memory, HybridMemory)
        """Whether layers with a window give back blocks that have left it."""
        places: Places | None = None
        if self.has_windows and window is not None:
            num_windowed = sum(map(bool, config.windows))
            layer_group = like_groups(config.num_layers - num_windowed, num_windowed).layers_per_group
            places = places_by_window(config, window, layer_group)
        else:
            layer_group, left_over = divmod(config.num_layers, memory.num_groups)
            if left_over:
                raise ValueError(f"{config.num_layers} layers of {config.name} in {memory.num_groups} equal groups")
        gpu_blocks, host_blocks = memory.gpu.num_blocks, memory.host.num_blocks
        scratch = gpu_blocks + scratch_blocks(scheduler)
        pin = device.type == "cuda"
        self.gpu = KVPool(config, scratch + spare_blocks, block_tokens, layer_group, device, dtype, places=places)
        # Blocks of states are not of KV alone.
        has_states = isinstance(memory, SavedStates) or isinstance(memory.backing, TieredStates)
        kv_blocks = 0 if has_states else host_blocks
        self.host = KVPool(config, max(1, kv_blocks), block_tokens, layer_group, "cpu", dtype, pin, places)
        self.counted = BlockIds(gpu_blocks)
        self.scratch = BlockIds(scratch)
        # The first ids are those that the scheduler counts.
        self.scratch.allocate(gpu_blocks)
        self._num_scratch = self.scratch.num_free
        self.engine = CopyEngine(device, inline=not pin if inline_copies is None else inline_copies)
        self.copies = KVCopies(self.engine, self.gpu, self.host, self.fail)
        self.states: LiveStates | None = None
        self.inputs: LayerInputs | None = None
        self.uncached: UncachedTokens | None = None
        groups = memory.num_groups
        if isinstance(memory, SavedStates):
            states = StatePlacement(self.counted, BlockIds(host_blocks), block_tokens)
            self.placement: Placement = states
            self.states = LiveStates(memory, states, decoder, self.gpu, self.engine, self.copies)
        elif isinstance(memory.backing, TieredStates):
            turns = TurnPlacement(self.counted, host_blocks, block_tokens)
            self.placement = turns
            self.states = TurnStates(memory.backing, turns, decoder, self.gpu, self.engine, self.copies)
        elif isinstance(memory, FirstLayersAgain):
            placement = UncachedPlacement(self.counted, self.host.ids, num_groups=groups, block_tokens=block_tokens)
            budget = scheduler.limits.max_num_batched_tokens
            self.placement, self.uncached = placement, UncachedTokens(placement, self.copies, layer_group, budget)
        elif self.has_windows and window is not None:
            self.placement = WindowedPlacement(self.counted, self.host.ids, window, block_tokens)
        else:
            self.placement = Placement(self.counted, self.host.ids, num_groups=groups, block_tokens=block_tokens)
            if isinstance(stage, PartialRecompute) and stage.seconds.input_share:
                self.inputs = LayerInputs(decoder, self.host, self.placement, self.scratch, self.copies, self.engine)
        self.beside = self.states or self.inputs or self.uncached
        """What the host keeps beside KV, in its place, or of some tokens alone."""

    def fail(self, seq: Sequence, reason: str) -> None:
        """A sequence cannot go on."""
        self.failures.append((seq, reason))

    def new_pass(self) -> LayerPass:
        """A pass over the layers that leaves on the host what is to be kept there."""
        return LayerPass(self.placement, self.scratch, self.copies) if self.beside is None else self.beside.new_pass()

    def release(self) -> None:
        """End the copy threads and give memory back."""
        self.engine.close()
        for owner in (self.gpu, self.host, self.beside):
            if owner is not None:
                owner.release()

    def check(self) -> None:
        """InvariantError unless the ids balance: no block is held twice, and pools list each free block once."""
        self.placement.check()
        self.counted.check()
        self.placement.host.check()
        if self.scratch.num_free != self._num_scratch:
            raise InvariantError(f"{self._num_scratch - self.scratch.num_free} scratch blocks were not given back")

    def check_counts(self) -> None:
        """InvariantError unless as many ids are in use as the scheduler counts. When it has no changes to tell."""
        memory = self.scheduler.memory
        for pool, ids, idle, reserved in (
            (memory.gpu, self.counted, self.placement.cached.num_blocks, 0),
            # Set aside for the coming step, and held by no sequence.
            (
                memory.host,
                self.placement.host,
                self.placement.num_idle_hosted,
                memory.host_reserved - memory.num_cached_on_host,
            ),
        ):
            used, counted = ids.num_blocks - ids.num_free - idle, pool.num_blocks - pool.free - reserved
            if used != counted:
                raise InvariantError(f"{pool.name}: {used} ids are in use, {counted} blocks are counted")
