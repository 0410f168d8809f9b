"""Inputs of layers on the host beside their KV, and a part of the KV of decodes made from them (KVPR).

Every layer-block of KV on the host has a block of inputs, a row a token, under the same id. A decode's layer gets the
inputs of its first tokens, whose KV it projects into the slot while the KV of the others is copied there.
"""

from collections import abc
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from torch import Tensor

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyEngine, CopyHandle
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.replay.held import BlockCopy
from gpu_runtime.kv.replay.placement import Placement
from gpu_runtime.kv.token_rows import TokenRows, token_places
from gpu_runtime.layers.layer_pass import Graphs, LayerPass
from gpu_runtime.layers.pass_members import BlockTables, Member
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decoder import Decoder, Scores
from sim.engine.changes import Projected
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence


class LayerInputs:
    """The inputs of one device's sequences.

    Args:
        decoder: computes.
        host: layer-blocks of KV on the host.
        placement, scratch, copies: as for `LayerPass`.
        engine: makes copies.
    """

    def __init__(
        self,
        decoder: Decoder,
        host: KVPool,
        placement: Placement,
        scratch: BlockIds,
        copies: KVCopies,
        engine: CopyEngine,
    ) -> None:
        self.placement, self.scratch, self.copies = placement, scratch, copies
        width = decoder.config.hidden_size
        self.rows = TokenRows(engine, host.num_blocks, 1, host.block_tokens, width, decoder.dtype)
        self._projected: dict[Sequence, int] = {}

    def release(self) -> None:
        """Give the memory back."""
        self.rows.release()

    def begin(self, plan: IterationPlan, decodes: Iterable[tuple[Sequence, int]]) -> None:
        """Share the blocks that the plan lets project among the decodes, each with its number of tokens: first come."""
        size = self.placement.block_tokens
        left = sum(record.num_tokens // size for record in plan.streamed if isinstance(record, Projected))
        self._projected.clear()
        for seq, num_tokens in decodes if left else ():
            taken = self._projected[seq] = min(left, self.placement.blocks_for(num_tokens - 1))
            left -= taken

    def new_pass(self) -> "ProjectingPass":
        """A pass over the layers that saves inputs and projects KV."""
        return ProjectingPass(self, self._projected)


class ProjectingPass(LayerPass):
    """A pass behind whose layers inputs leave for the host, and before which inputs of decodes come from there.

    Args:
        inputs: of all sequences.
        projected: of decodes, how many blocks of each layer are made from inputs.
    """

    def __init__(self, inputs: LayerInputs, projected: dict[Sequence, int]) -> None:
        super().__init__(inputs.placement, inputs.scratch, inputs.copies)
        self._rows, self._blocks_of = inputs.rows, projected
        self._projecting: list[Member] = []
        self._arriving: dict[int, tuple[Tensor, CopyHandle]] = {}
        self._handles: list[CopyHandle] = []
        self._batch: AttentionBatch | None = None

    def run(self, decoder: Decoder, pool: KVPool, tables: BlockTables, graphs: Graphs) -> Scores:
        self._decoder, self._pool = decoder, pool
        self._projecting = [member for member in self._moving if self._blocks_of.get(member.seq)]
        if self._projecting:
            self._batch = self._batch_of(pool)
        scores = super().run(decoder, pool, tables, graphs)
        for member in self._moving:
            self._copies.wait(member.seq, self._handles)
        return scores

    def _batch_of(self, pool: KVPool) -> AttentionBatch:
        """The tokens that are projected, in the slots of each layer."""
        tables = [[member.slot(layer) for member in self._projecting] for layer in range(self._placement.num_groups)]
        tokens = [self._num_tokens(member) for member in self._projecting]
        return AttentionBatch.build(tokens, [0] * len(tokens), tables, pool.block_tokens, pool.device)

    def _num_tokens(self, member: Member) -> int:
        """Tokens that are projected: the last block may not be full."""
        return min(self._blocks_of[member.seq] * self._placement.block_tokens, member.cached)

    # -- coming in -----------------------------------------------------------------------------------------------------

    def _fetch(self, wanted: list[tuple[Member, int]], after: CopyHandle | None = None) -> None:
        """Inputs come first: they are projected while KV is copied."""
        layers = {layer for member, layer in wanted if member in self._projecting}
        for layer in layers:
            size = self._placement.block_tokens
            places = [
                token_places(member.held.host[layer], 0, self._num_tokens(member), size) for member in self._projecting
            ]
            self._arriving[layer] = self._rows.load(0, np.concatenate(places))
        super()._fetch(wanted, after)

    def _copy_in(self, member: Member, layer: int) -> BlockCopy:
        copy, blocks = super()._copy_in(member, layer), self._blocks_of.get(member.seq, 0)
        member.num_read -= blocks
        member.num_projected += blocks
        return replace(copy, source=copy.source[blocks:], target=copy.target[blocks:])

    def _before_layer(self, layer: int) -> None:
        if layer in self._arriving:
            assert self._batch is not None
            values, handle = self._arriving.pop(layer)
            # The slots are free once their KV has left; the KV of the others may still be on its way.
            left = [
                member.leaving[earlier] for member in self._projecting if (earlier := member.before(layer)) is not None
            ]
            for awaited in (*dict.fromkeys(left), handle):
                self._copies.wait_in_stream([member.seq for member in self._projecting], awaited)
            self._decoder.layers[layer].restore_kv(values, self._batch, self._pool, layer)
        super()._before_layer(layer)

    # -- going out -----------------------------------------------------------------------------------------------------

    def _computed(self, layer: int, entered: Tensor, batch: AttentionBatch, pool: KVPool) -> None:
        super()._computed(layer, entered, batch, pool)
        rows, places = self._new_tokens(lambda member: member.held.host.get(layer))
        if rows:
            for member in self._moving:
                member.num_saved += member.num_new if layer in member.turns else 0
            self._handles.append(self._rows.save(0, entered, rows, places))

    def abandon(self) -> None:
        arriving: abc.Sequence[CopyHandle] = [handle for _, handle in self._arriving.values()]
        for member in self._moving:
            self._copies.wait(member.seq, [*self._handles, *arriving])
        super().abandon()
