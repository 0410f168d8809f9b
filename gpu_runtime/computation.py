"""`Computation`: what a plan computes, as passes over the layers or as a captured graph, and the tokens it chooses."""

from collections import abc
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gpu_runtime.device_memory import DeviceMemory
from gpu_runtime.device_stream import finish
from gpu_runtime.kv.transfers import Transfers
from gpu_runtime.layers.layer_pass import Graphs, LayerPass
from gpu_runtime.layers.pass_members import BlockTables
from gpu_runtime.measured.executed import Executed, Moved
from gpu_runtime.model.decode_graph import Capture, CudaCapture, DecodeGraph
from gpu_runtime.model.decoder import Scores
from gpu_runtime.model.piece_graphs import PieceGraphs
from gpu_runtime.tokens.token_ids import TokenIds
from gpu_runtime.tokens.tokens_in_flight import TokensInFlight
from sim.engine.changes import Direction
from sim.engine.plan import IterationPlan, PrefillChunk
from sim.engine.sequence import Sequence

Decode = tuple[Sequence, int]
"""A sequence that computes one token, and its tokens with that one."""
Choose = Callable[[Scores, abc.Sequence[Sequence], abc.Sequence[int]], Tensor]
"""The next tokens [n] by their scores, sequences and positions."""


class Computation:
    """Computes on the blocks of `memory`; copies that outlive an iteration go to `transfers`.

    `choose` makes tokens [n] of scores of n rows, told whose they are and where in their sequences. `in_flight` hears
    whose tokens are chosen, and which; it knows those that the iteration before chooses.
    """

    def __init__(
        self, memory: DeviceMemory, transfers: Transfers, tokens: TokenIds, choose: Choose, in_flight: TokensInFlight
    ) -> None:
        self.tables = BlockTables(memory.placement)
        self._memory, self._transfers, self._tokens = memory, transfers, tokens
        self._choose, self._in_flight = choose, in_flight
        self._caches_prefixes = memory.scheduler.memory.caches_prefixes
        self._done = Executed()
        self._graphs = Graphs()
        self._drafts: Mapping[Sequence, abc.Sequence[int]] = {}

    def capture(self, batch_sizes: abc.Sequence[int], piece_sizes: abc.Sequence[int], capture: Capture | None) -> None:
        """Capture decodes of these batch sizes and iterations of so many tokens, where all that they read is KV."""
        memory, scheduler = self._memory, self._memory.scheduler
        if memory.beside is not None or not (batch_sizes or piece_sizes):
            return
        capture = capture or CudaCapture(memory.device)
        decodes, pieces = None, None
        if batch_sizes:
            decodes = DecodeGraph(
                memory.decoder,
                memory.gpu,
                batch_sizes,
                memory.placement.blocks_for(scheduler.limits.max_model_len),
                by_layer=scheduler.stage.streams,
                capture=capture,
            )
        if piece_sizes:
            pieces = PieceGraphs(memory.decoder, piece_sizes, capture)
        self._graphs = Graphs(decodes, pieces)

    def release(self) -> None:
        """Give the graphs' memory back."""
        self._graphs = Graphs()

    def run(
        self,
        plan: IterationPlan,
        decodes: abc.Sequence[Decode],
        done: Executed,
        drafts: Mapping[Sequence, abc.Sequence[int]] | None = None,
    ) -> None:
        """Compute; where memory runs out, part by part; a sequence whose part still does not fit fails.

        `drafts` are verified behind the tokens of decodes: each row has its token chosen.
        """
        self._done, self._drafts = done, drafts or {}
        try:
            self._compute(plan, plan.chunks, decodes)
        except torch.OutOfMemoryError:
            # The error keeps the frames, and with them the tensors that filled the memory: leave it first.
            if self._memory.decoder.group is not None:
                # Other ranks may have had enough, and would not compute in parts.
                raise
        else:
            return
        parts: list[tuple[abc.Sequence[PrefillChunk], abc.Sequence[Decode]]] = [((chunk,), ()) for chunk in plan.chunks]
        parts += [((), (decode,)) for decode in decodes]
        for chunks, few in parts:
            # What was queued before may still read what the host writes next (`DecodeGraph`).
            finish(self._memory.device)
            if self._memory.device.type == "cuda":
                torch.cuda.empty_cache()
            self._in_flight.keep()
            try:
                self._compute(plan, chunks, few)
            except torch.OutOfMemoryError as error:
                self._give_up(plan, chunks, few, f"out of memory: {str(error).splitlines()[0]}")

    def _give_up(
        self, plan: IterationPlan, chunks: abc.Sequence[PrefillChunk], decodes: abc.Sequence[Decode], reason: str
    ) -> None:
        """A sequence that could not be computed: it fails, and the token that the engine counts is a filler."""
        sampled = [c.seq for c in chunks if c.num_cached + c.num_new == c.seq.num_tokens]
        self._in_flight.give_up([*sampled, *(seq for seq, _ in decodes)])
        self._done.num_decodes += len(decodes)
        for seq in [*(chunk.seq for chunk in chunks), *(seq for seq, _ in decodes)]:
            self._memory.fail(seq, reason)
            self._done.given_up.add(seq)
            for move in plan.behind:
                if move.seq is seq and move.is_reported:
                    # Copies behind its prefill have nothing to copy: they are over.
                    self._transfers.begin_behind(move, [])

    def _compute(self, plan: IterationPlan, chunks: abc.Sequence[PrefillChunk], decodes: abc.Sequence[Decode]) -> None:
        if not chunks and not self._drafts and self._replay(decodes):
            return
        work = self._memory.new_pass()
        spans = [(c.seq, c.num_cached, c.num_cached + c.num_new) for c in chunks]
        spans += [(seq, num_tokens - 1, num_tokens) for seq, num_tokens in decodes]
        if self._caches_prefixes:
            spans = self._memory.placement.prefixes.to_compute(spans)
        work.late = self._in_flight.late()
        for seq, first, end in spans[: len(chunks)]:
            work.add_chunk(seq, end - first, first, self._tokens.of(seq))
        for seq, first, end in spans[len(chunks) :]:
            work.add_decode(seq, end, self._tokens.of(seq), end - first)
            if drafts := self._drafts.get(seq):
                work.add_drafts(drafts)
        try:
            scores = work.run(self._memory.decoder, self._memory.gpu, self.tables, self._graphs)
            chosen = self._choose(scores, work.sampled, work.sampled_positions)
        except torch.OutOfMemoryError:
            work.abandon()
            self._note_loads(work)
            raise
        if self._caches_prefixes:
            self._memory.placement.prefixes.computed(spans)
            self._note_loads(work)
        self._finish_copies(plan, work)
        self._done.num_decodes += len(decodes)
        self._in_flight.chose(work.sampled, chosen)
        work.release()

    def _note_loads(self, work: LayerPass) -> None:
        """What a pass has loaded from the host's cache, or has failed to."""
        self._done.num_read += work.num_loaded
        for seq, blocks in work.spoilt:
            self._memory.placement.prefixes.spoil(seq, blocks)

    def _replay(self, decodes: abc.Sequence[Decode]) -> bool:
        """Compute decodes whose KV is all on the GPU in a graph; False, and nothing is done, where that cannot be."""
        graph, unwritten = self._graphs.decodes, self._memory.placement.cached.unwritten
        if graph is None or unwritten or not graph.fits(len(decodes), max(length for _, length in decodes)):
            return False
        seqs, lengths = [seq for seq, _ in decodes], [length for _, length in decodes]
        rows = self.tables.resident(seqs)
        if rows is None:
            return False
        tokens, late = [], self._in_flight.late()
        for row, (seq, length) in enumerate(decodes):
            is_late = late is not None and late.take(row, seq)
            tokens.append(0 if is_late else self._tokens.of(seq)[length - 1])
        chosen = self._choose(graph.run(tokens, lengths, rows, late=late), seqs, lengths)
        if self._caches_prefixes:
            self._memory.placement.prefixes.computed([(seq, length - 1, length) for seq, length in decodes])
        self._done.num_decodes += len(decodes)
        self._in_flight.chose(seqs, chosen)
        return True

    def _finish_copies(self, plan: IterationPlan, work: LayerPass) -> None:
        """Copies behind a prefill's last chunk go on after it; what else a pass wrote must be out before its slots are
        reused, and before the next chunk reads it."""
        done, behind = self._done, {move.seq: move for move in plan.behind}
        for member in work.members:
            done.num_read += member.num_read
            done.num_projected += member.num_projected * self._memory.gpu.block_tokens
            done.num_rebuilt += member.num_rebuilt
            done.num_saved += member.num_saved
            seq, handles, move = member.seq, list(member.leaving.values()), behind.get(member.seq)
            if move is None:
                done.num_written += member.num_sent
            else:
                done.behind.append(Moved(seq, tuple(member.leaving), Direction.D2H, member.num_sent))
            if move is not None and move.is_reported:
                self._transfers.begin_behind(move, handles)
            else:
                self._memory.copies.wait(seq, handles)
