"""`LayerPass`: one run over the layers: its members, where their KV is, and the copies that layers wait for.

Layers on the host (LayerKV, groups of one layer) pass through slots on the GPU, in turn. Their copies run ahead: the
first ones start before the computation, the others as soon as the slot is free again (LayerKV section 3.1.2).
"""

from collections import abc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gpu_runtime.device_stream import to_device
from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyHandle
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.replay.held import BlockCopy
from gpu_runtime.kv.replay.placement import Placement
from gpu_runtime.kv.token_rows import token_places
from gpu_runtime.layers.pass_members import BlockTables, Member
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decode_graph import DecodeGraph
from gpu_runtime.model.decoder import Decoder, Scores, scored
from gpu_runtime.model.piece_graphs import PieceGraphs
from gpu_runtime.tokens.tokens_in_flight import LateTokens
from sim.engine.changes import Direction
from sim.engine.layers import SEND_BUFFER_LAYERS
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


class Graphs(NamedTuple):
    """What was captured: decodes, and iterations with prompts."""

    decodes: DecodeGraph | None = None
    pieces: PieceGraphs | None = None


class LayerPass:
    """The members of a pass, in the order of their rows, and what happens around each layer.

    Args:
        placement: whose blocks are where.
        scratch: GPU blocks for the slots of decodes; a prefill brings its own.
        copies: between the tiers.
    """

    def __init__(self, placement: Placement, scratch: BlockIds, copies: KVCopies) -> None:
        self._placement, self._scratch, self._copies = placement, scratch, copies
        self.members: list[Member] = []
        self._token_ids: list[int] = []
        self._sampled: list[int] = []
        # The members whose rows give tokens, and how far before its last each of these rows stands.
        self._rows_back: list[int] = []
        self._moving: list[Member] = []
        self._borrowed: list[list[int]] = []
        self._only_decodes = True
        self._loads: list[CopyHandle] = []
        # By layer, the copy from the host's cache.
        self._loaded: set[int] = set()
        # The blocks that they fill.
        self.late: LateTokens | None = None
        """Where some of the tokens are chosen by an iteration that still runs."""
        self.spoilt: list[tuple[Sequence, set[int]]] = []
        """Sequences that have computed on blocks that a copy failed to fill, and these."""

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences whose next token the pass finds."""
        return [self.members[i].seq for i in self._sampled]

    @property
    def sampled_positions(self) -> list[int]:
        """Where those tokens stand in their sequences."""
        return [self.members[i].span[2] - back for i, back in zip(self._sampled, self._rows_back, strict=True)]

    @property
    def num_loaded(self) -> int:
        """Blocks that come from the host's cache."""
        return len(self._loaded)

    def add_chunk(self, seq: Sequence, num_new: int, cached: int, tokens: abc.Sequence[int]) -> None:
        """A member that computes `num_new` more of its prompt's `tokens`."""
        self._only_decodes = False
        if cached + num_new == seq.num_tokens:
            self._sampled.append(len(self.members))
            self._rows_back.append(0)
        self._token_ids += tokens[cached : cached + num_new]
        self._add(seq, num_new, cached, self._placement.held[seq].slots)

    def add_decode(self, seq: Sequence, num_tokens: int, tokens: abc.Sequence[int], num_new: int = 1) -> None:
        """A member that computes the last of its context's `num_tokens` tokens, `num_new` where others lack KV.

        The last one is not among `tokens` where it is `late`.
        """
        self._only_decodes = self._only_decodes and num_new == 1
        cached = num_tokens - num_new
        blocks = self._placement.blocks_for(num_tokens)
        num_slots = min(SEND_BUFFER_LAYERS, len(self._placement.held[seq].host))
        if num_slots * blocks > self._scratch.num_free:
            raise InvariantError(
                f"{seq} decodes, but has layer groups on the host and {self._scratch.num_free} blocks are left for "
                f"{num_slots} times {blocks} to pass through"
            )
        slots = [self._scratch.allocate(blocks) for _ in range(num_slots)]
        self._borrowed += slots
        self._sampled.append(len(self.members))
        self._rows_back.append(0)
        self._token_ids += tokens[cached:num_tokens]
        if self.late is not None and self.late.take(len(self._token_ids), seq):
            self._token_ids.append(0)
        self._add(seq, num_new, cached, slots)

    def add_drafts(self, drafts: abc.Sequence[int]) -> None:
        """Verify these behind the decode that was added last: each of its rows gives a token."""
        self._only_decodes = False
        self._token_ids += drafts
        self.members[-1].num_new += len(drafts)
        self._sampled += [len(self.members) - 1] * len(drafts)
        self._rows_back[-1:] = range(len(drafts), -1, -1)

    def _add(self, seq: Sequence, num_new: int, cached: int, slots: list[list[int]]) -> None:
        held = self._placement.held[seq]
        hosted = sorted(held.host)
        if hosted and not slots:
            raise InvariantError(f"{seq} is computed, has {len(hosted)} layer groups on the host and no send buffer")
        member = Member(seq, num_new, cached, held, slots if hosted else [], hosted)
        self.members.append(member)
        if member.slots:
            self._moving.append(member)

    def run(self, decoder: Decoder, pool: KVPool, tables: BlockTables, graphs: Graphs) -> Scores:
        """Compute the layers, in `graphs` where these can; the scores of the next tokens of `sampled`, a row each."""
        self._start()
        graph, pieces = graphs
        # Between the layers of a single graph nothing may happen.
        if graph is not None and self._only_decodes and (graph.by_layer or not self._moving):
            lengths = [member.cached + 1 for member in self.members]
            if graph.fits(len(lengths), max(lengths)):
                between: dict[str, Callable[[int], None]] = (
                    {"before_layer": self._before_layer, "after_layer": self._after_layer} if self._moving else {}
                )
                rows = [tables.rows(member) for member in self.members]
                return graph.run(self._token_ids, lengths, rows, late=self.late, **between)
        num_new, cached = [member.num_new for member in self.members], [member.cached for member in self.members]
        device = pool.device
        batch = AttentionBatch.build(num_new, cached, tables.of(self.members), pool.block_tokens, device)
        token_ids = to_device(self._token_ids, device)
        if self.late is not None:
            self.late.fill(token_ids)
        rows = batch.last_rows[to_device(self._sampled, device)] if self._sampled else None
        if rows is not None and any(self._rows_back):
            rows = rows - to_device(self._rows_back, device)
        if pieces is not None and pieces.fits(len(token_ids)) and not (self._moving or self._loads):
            return scored(pieces.forward(token_ids, batch, pool, rows))
        logits = decoder.forward(
            token_ids,
            batch,
            pool,
            rows,
            before_layer=self._before_layer,
            after_layer=lambda layer, entered: self._computed(layer, entered, batch, pool),
        )
        return scored(logits)

    def _computed(self, layer: int, entered: Tensor, batch: AttentionBatch, pool: KVPool) -> None:
        """A layer, whose input [N, h] was `entered`, has been queued."""
        self._after_layer(layer)

    def _new_tokens(self, blocks_of: Callable[[Member], abc.Sequence[int] | None]) -> tuple[list[int], np.ndarray]:
        """The rows of the pass that tokens of members have, and the places of these in blocks on the host.

        `blocks_of` a member are the blocks, in order; None leaves it out. Places [rows] are those of `token_places`.
        """
        start, rows, places = 0, list[int](), [np.empty(0, dtype=np.int64)]
        for member in self.members:
            blocks = blocks_of(member)
            if blocks is not None:
                rows += range(start, start + member.num_new)
                end = member.cached + member.num_new
                places.append(token_places(blocks, member.cached, end, self._placement.block_tokens))
            start += member.num_new
        return rows, np.concatenate(places)

    def _start(self) -> None:
        """Start the copies into all slots: those of the first turn as one, then those of the second.

        What comes from the host's cache comes layer by layer (CachedAttention section 3.2.1).
        """
        loading = self._placement.hosted.loading
        loads = [loading.pop(member.seq) for member in self.members if member.seq in loading] if loading else []
        if loads:
            self._loads = self._copies.start_by_layer(*loads)
            self._loaded = {block for load in loads for block in load.target}
        for turn in range(SEND_BUFFER_LAYERS):
            self._fetch(
                [(m, m.hosted[turn]) for m in self._moving if m.cached and turn < min(len(m.slots), len(m.hosted))]
            )

    def _fetch(self, wanted: list[tuple[Member, int]], after: CopyHandle | None = None) -> None:
        """Start one copy into the slots of all these members, each for a layer of its own; once `after` is over."""
        if wanted:
            copies = [self._copy_in(member, layer) for member, layer in wanted]
            handle = self._copies.start(*copies) if after is None else self._copies.start_after(after, *copies)
            for member, layer in wanted:
                member.arriving[layer] = handle

    def _before_layer(self, layer: int) -> None:
        """Wait until the slots of this layer are free and have what was cached before."""
        if self._loads and not self._copies.wait_in_stream(self._readers(), self._loads[layer]):
            self.spoilt = [(seq, self._loaded) for seq in self._readers()]
        awaited: dict[CopyHandle, list[Sequence]] = {}
        for member in self._moving:
            if layer not in member.turns:
                continue
            if member.cached:
                awaited.setdefault(member.arriving[layer], []).append(member.seq)
            elif (earlier := member.before(layer)) is not None:
                awaited.setdefault(member.leaving[earlier], []).append(member.seq)
        for handle, seqs in awaited.items():
            self._copies.wait_in_stream(seqs, handle)

    def _readers(self) -> Iterator[Sequence]:
        """Sequences that read what comes from the host's cache: for which it comes, or that hit it in the same pass."""
        return (m.seq for m in self.members if not self._loaded.isdisjoint(m.held.gpu[0]))

    def _after_layer(self, layer: int) -> None:
        """Send what the layer has written to the host, and fetch what comes into its slots next, each as one copy."""
        here = [member for member in self._moving if layer in member.turns]
        if not here:
            return
        leaving = self._copies.start(*(self._copy_out(member, layer) for member in here))
        wanted: list[tuple[Member, int]] = []
        for member in here:
            member.leaving[layer] = leaving
            later = member.turns[layer] + len(member.slots)
            if member.cached and later < len(member.hosted):
                wanted.append((member, member.hosted[later]))
        self._fetch(wanted, leaving)

    def _copy_in(self, member: Member, layer: int) -> BlockCopy:
        blocks = self._placement.blocks_for(member.cached)
        source, target = member.held.host[layer][:blocks], member.slot(layer)[:blocks]
        member.num_read += len(source)
        return BlockCopy(member.seq, (layer,), Direction.H2D, tuple(source), tuple(target))

    def _copy_out(self, member: Member, layer: int) -> BlockCopy:
        first = member.cached // self._placement.block_tokens
        blocks = self._placement.blocks_for(member.cached + member.num_new)
        source, target = member.slot(layer)[first:blocks], member.held.host[layer][first:blocks]
        member.num_sent += len(source)
        return BlockCopy(member.seq, (layer,), Direction.D2H, tuple(source), tuple(target))

    def abandon(self) -> None:
        """The pass broke off: wait for its copies, and give back what it borrowed."""
        for member in self._moving:
            self._copies.wait(member.seq, [*member.arriving.values(), *member.leaving.values()])
        for seq in self._readers() if self._loads else ():
            if not self._copies.wait(seq, self._loads):
                self.spoilt.append((seq, self._loaded))
        self.release()

    def release(self) -> None:
        """Give the borrowed slots back: nothing computes on them or copies any more."""
        for ids in self._borrowed:
            self._scratch.free(ids)
        self._borrowed.clear()
