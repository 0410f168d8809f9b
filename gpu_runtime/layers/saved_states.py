"""States on the host while sequences run (HCache): saved behind every layer, and KV made from them when one returns.

Of some layers the inputs are kept, of some the keys and values, of the first ones nothing (`sim.cost.restoring`). A
block of states has a row for each of its tokens and of those layers (`kv.token_rows`).
"""

from collections import abc
from math import ceil

import numpy as np
from torch import Tensor

from gpu_runtime.device_stream import to_device
from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyEngine, CopyFailed
from gpu_runtime.kv.copy_worker import CopyHandle
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.replay.state_placement import StatePlacement, StateRestore
from gpu_runtime.kv.replay.turn_placement import TurnPlacement
from gpu_runtime.kv.token_rows import TokenRows, token_places
from gpu_runtime.layers.layer_pass import Graphs, LayerPass
from gpu_runtime.layers.pass_members import BlockTables, Member
from gpu_runtime.measured.executed import Moved
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decoder import Decoder, Scores
from sim.engine.changes import Restore
from sim.errors import InvariantError
from sim.systems.hcache.saved_states import SavedStates, TieredStates

AHEAD = 2
"""Layers whose states are on their way to the GPU at a time."""
AWAITED = CopyHandle()
"""Stands for copies that are over and have been heard of."""
AWAITED.finish(None)
WHOLE = (0,)
"""The one layer group."""


class LiveStates:
    """The states of one device's sequences.

    Args:
        memory: says how each layer is restored.
        placement: whose blocks are where.
        decoder, pool: compute the KV; where it is.
        engine, copies: make copies; `copies` also notes sequences whose copy fails.
    """

    def __init__(
        self,
        memory: SavedStates | TieredStates,
        placement: StatePlacement | TurnPlacement,
        decoder: Decoder,
        pool: KVPool,
        engine: CopyEngine,
        copies: KVCopies,
    ) -> None:
        config, tokens, blocks = decoder.config, pool.block_tokens, placement.host.num_blocks
        self.split, self.share = memory.split, memory.share
        self.placement, self.decoder, self.pool, self.copies = placement, decoder, pool, copies
        if sum(self.split) != config.num_layers:
            raise ValueError(f"{sum(self.split)} layers are restored, {config.name} has {config.num_layers}")
        self._budget = memory.limits.max_num_batched_tokens
        kv_width, kv_dtype = 2 * config.kv_size, pool.raw.dtype
        self._inputs = TokenRows(engine, blocks, self.split.hidden, tokens, config.hidden_size, decoder.dtype)
        self._kv = TokenRows(engine, blocks, self.split.copied, tokens, kv_width, kv_dtype)

    def release(self) -> None:
        """Give the memory back."""
        self._inputs.release()
        self._kv.release()

    def new_pass(self) -> "SavingPass":
        """A pass over the layers that saves states."""
        return SavingPass(self)

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self, layer: int, entered: Tensor, slots: Tensor, rows: list[int], places: np.ndarray
    ) -> CopyHandle | None:
        """Save what is kept of a layer of some rows of a pass; None where nothing is.

        Args:
            layer: of the model.
            entered: its input [N, h].
            slots: [N] where its KV has gone: block x block_tokens + offset.
            rows: which of the rows.
            places: [len(rows)] where states of their tokens go.
        """
        recomputed, hidden, _ = self.split
        if layer < recomputed:
            return None
        if layer < recomputed + hidden:
            return self._inputs.save(layer - recomputed, entered, rows, places)
        blocks, offsets = self._at(slots)
        values = self.pool.raw[:, layer][blocks, :, :, offsets].flatten(1)
        return self._kv.save(layer - recomputed - hidden, values, rows, places)

    def await_saved(self, members: abc.Sequence[Member], handles: abc.Sequence[CopyHandle]) -> None:
        """Wait until the states of a pass are on the host; where a copy fails, those of no member are."""
        for member in members:
            self.copies.wait(member.seq, handles)

    def _at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = slots.long()
        return slots // self.pool.block_tokens, slots % self.pool.block_tokens

    # -- restoring ---------------------------------------------------------------------------------------------------

    def restore(self, copy: StateRestore, tokens: abc.Sequence[int]) -> Restore | Moved:
        """Bring a sequence's KV back, of whose `tokens` the first are to be restored; returns what was done.

        The copies of two layers are under way at a time: beside the layers that are computed again, then one another's
        projections.
        """
        planned, layers = copy.restore, tuple(range(sum(self.split)))
        copied = planned.kv_groups if planned.computes else layers
        first, last = self.split.recomputed, self.split.recomputed + self.split.hidden
        if (planned.recomputed_groups, planned.hidden_groups, copied) != (
            layers[:first], layers[first:last], layers[last:],
        ):  # fmt: skip
            raise InvariantError(f"{copy.seq}: {planned}, but states are kept for a split of {self.split}")
        wanted = [*planned.hidden_groups, *copied]
        places = token_places(copy.source, 0, planned.num_tokens, self.pool.block_tokens)
        # Whole blocks are copied, also where a prompt's are not full.
        whole = token_places(copy.source, 0, len(copy.source) * self.pool.block_tokens, self.pool.block_tokens)
        under_way = [self._load(layer, places, whole) for layer in wanted[:AHEAD]]
        again = self._recompute(copy, planned, tokens)
        projected: list[int] = []
        written: list[int] = []
        num_blocks = 0
        for turn, layer in enumerate(wanted):
            values, handle = under_way.pop(0)
            try:
                handle.wait_in_stream()
            except CopyFailed as error:
                self.failed(copy, f"copy of KV blocks: {error}")
            if layer in planned.hidden_groups:
                batch = self._batch(copy, len(values), 0)
                self.decoder.layers[layer].restore_kv(values, batch, self.pool, layer)
                projected.append(layer)
            else:
                self._write(layer, values, copy.target)
                written.append(layer)
                num_blocks += len(values) // self.pool.block_tokens
            if turn + AHEAD < len(wanted):
                under_way.append(self._load(wanted[turn + AHEAD], places, whole))
        if planned.computes:
            return Restore(copy.seq, planned.num_tokens, tuple(projected), tuple(written), again, num_blocks)
        return Moved(copy.seq, copy.groups, copy.direction, num_blocks // len(layers))

    def failed(self, copy: StateRestore, reason: str) -> None:
        """KV has not come back."""
        self.copies.fail(copy.seq, reason)

    def _load(self, layer: int, places: np.ndarray, whole: np.ndarray) -> tuple[Tensor, CopyHandle]:
        index = layer - self.split.recomputed
        if index < self.split.hidden:
            return self._inputs.load(index, places)
        return self._kv.load(index - self.split.hidden, whole)

    def _recompute(self, copy: StateRestore, planned: Restore, tokens: abc.Sequence[int]) -> tuple[int, ...]:
        """The first layers compute again, as many tokens at a time as an iteration may have; which ones."""
        again, before = planned.recomputed_groups, len(copy.before) * self.pool.block_tokens
        for first in range(0, planned.num_tokens if again else 0, self._budget):
            num_new = min(self._budget, planned.num_tokens - first)
            new = list(tokens[before + first : before + first + num_new])
            batch = self._batch(copy, num_new, first)
            hidden = self.decoder.embed(to_device(new, self.pool.device))
            for layer in again:
                hidden = self.decoder.layers[layer].forward(hidden, batch, self.pool, layer)
        return again

    def _batch(self, copy: StateRestore, num_new: int, first: int) -> AttentionBatch:
        """Some of the tokens that come back."""
        cached, blocks = len(copy.before) * self.pool.block_tokens + first, [[(*copy.before, *copy.target)]]
        return AttentionBatch.build([num_new], [cached], blocks, self.pool.block_tokens, self.pool.device)

    def _write(self, layer: int, values: Tensor, blocks: abc.Sequence[int]) -> None:
        slots = token_places(blocks, 0, len(values), self.pool.block_tokens)
        found, offsets = self._at(to_device(slots, self.pool.device))
        cache = self.pool.raw[:, layer]
        cache[found, :, :, offsets] = values.unflatten(1, (2, cache.shape[2], cache.shape[4]))


class TurnStates(LiveStates):
    """`LiveStates` of ended turns: what fails ends no sequence, and is computed."""

    placement: TurnPlacement

    def failed(self, copy: StateRestore, reason: str) -> None:
        self.placement.prefixes.spoil(copy.seq, set(copy.target))

    def await_saved(self, members: abc.Sequence[Member], handles: abc.Sequence[CopyHandle]) -> None:
        if not self.copies.went_well(handles):
            self.placement.lose(member.span for member in members)


class SavingPass(LayerPass):
    """A pass behind whose layers states leave for the host. Its end waits for them: what decodes next is saved."""

    def __init__(self, states: LiveStates) -> None:
        super().__init__(states.placement, BlockIds(0), states.copies)
        self._states = states
        self._rows: list[int] = []
        self._places = np.empty(0, dtype=np.int64)
        self._handles: list[CopyHandle] = []

    def run(self, decoder: Decoder, pool: KVPool, tables: BlockTables, graphs: Graphs) -> Scores:
        saved = self._states.placement.states_of(member.span for member in self.members)
        self._rows, self._places = self._new_tokens(lambda member: saved.get(member.seq))
        scores = super().run(decoder, pool, tables, graphs)
        members = [member for member in self.members if member.seq in saved]
        self._states.await_saved(members, self._handles)
        for member in members:
            if member.num_new > 1:
                # Plans count whole blocks of KV's size, and single tokens not at all.
                member.num_sent = ceil(self._placement.blocks_for(member.num_new) * self._states.share)
                member.leaving = dict.fromkeys(WHOLE, AWAITED)
        return scores

    def _computed(self, layer: int, entered: Tensor, batch: AttentionBatch, pool: KVPool) -> None:
        super()._computed(layer, entered, batch, pool)
        if self._rows:
            handle = self._states.save(layer, entered, batch.slot_mapping[0], self._rows, self._places)
            if handle is not None:
                self._handles.append(handle)

    def abandon(self) -> None:
        self._states.await_saved(self.members, self._handles)
        super().abandon()
