"""`TorchDevice`: executes plans with torch and measures. The real clock's half of what the simulator prices.

One iteration: the plan's changes are replayed on block ids, copies that must come first are made, copies beside the
computation start, then the layers run (`layer_pass`): one after the other, or where nothing happens between them as a
captured graph. `check_executed` holds what was done against the plan and the ids against the scheduler's counts.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf
from threading import Event
from time import perf_counter

import torch
from torch import Tensor

from gpu_runtime.block_hashes import BlockHashes
from gpu_runtime.device_memory import DeviceMemory
from gpu_runtime.executed import Executed, Moved
from gpu_runtime.kv.transfers import Transfers
from gpu_runtime.layer_pass import BlockTables, LayerPass
from gpu_runtime.model import backend
from gpu_runtime.model.decode_graph import Capture, DecodeGraph
from gpu_runtime.model.decoder import Decoder, greedy
from gpu_runtime.saved_states import StateRestore
from gpu_runtime.token_ids import TokenIds
from gpu_runtime.warm_up import run_copies, run_kernels
from sim.engine.plan import Direction, IterationPlan, Move, PrefillChunk, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from traces.request import Request

PromptOf = Callable[[Request], Seq[int]]
"""The token ids of a request's prompt, as many as it has prompt tokens."""
OnToken = Callable[[Sequence, int, float], None]
"""Hears of every token: whose, which, and when, s."""
WAKE_S = 0.05
"""Longest sleep while nothing is known to happen, s."""


class TorchDevice:
    """A decoder, two pools of KV blocks, copy streams and a clock.

    Args:
        decoder: the model.
        scheduler: of the engine this device serves, whose parts say how large the pools are and how many layers a block
            holds; read, and asked to tell of cached blocks, else never changed.
        prompt_of: token ids of a request's prompt.
        on_token: hears of every token.
        stays_awake: wait for a known time without sleeping. An idle core loses its caches to others and its clock to
            power saving, and its next iteration may take half as long again.
        inline_copies: whether the computing thread copies, as it does on a CPU by default.
        graph_batch_sizes: batches of decodes that `warm_up` captures as graphs (`model.capture_sizes`).
        capture: makes the graphs; None: as CUDA graphs.
        spare_blocks: more GPU blocks, which nobody is given.

    Raises:
        ValueError: the scheduler's layer groups do not divide the decoder's layers evenly.
        UserError: a memory whose plans cannot be executed.
    """

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler,
        *,
        prompt_of: PromptOf,
        device: torch.device | str,
        dtype: torch.dtype,
        on_token: OnToken | None = None,
        stays_awake: bool = False,
        inline_copies: bool | None = None,
        graph_batch_sizes: Seq[int] = (),
        capture: Capture | None = None,
        spare_blocks: int = 0,
    ) -> None:
        scheduler.memory.tell_blocks()
        self.decoder, self.scheduler = decoder, scheduler
        self.device = torch.device(device)
        self.prompt_of, self.on_token = prompt_of, on_token
        self.memory = DeviceMemory(
            decoder,
            scheduler,
            self.device,
            dtype,
            inline_copies=inline_copies,
            spare_blocks=spare_blocks,
            fail=self._fail,
        )
        self._tables = BlockTables(self.memory.placement)
        self._transfers = Transfers(self.memory.placement, self.memory.copies)
        self._caches_prefixes = scheduler.memory.caches_prefixes
        self.tokens = TokenIds(BlockHashes(scheduler.limits.block_size) if self._caches_prefixes else None)
        self.executed = Executed()
        """What the last iteration copied."""
        self._failures: list[tuple[Sequence, str]] = []
        self._graph_batch_sizes, self._capture = graph_batch_sizes, capture
        self._graph: DecodeGraph | None = None
        self._stays_awake = stays_awake
        self._woken = Event()
        self._begun_s = perf_counter()

    # -- the clock -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Set the clock to zero."""
        self.memory.engine.spans.start_clock()
        self._begun_s = perf_counter()

    def now_s(self) -> float:
        return perf_counter() - self._begun_s

    def wait(self, until_s: float) -> None:
        while True:
            left_s = until_s - self.now_s()
            if left_s <= 0 or self._transfers.any_ended:
                return
            # Copies end without a signal: look again soon while there are any.
            awake = self._stays_awake and left_s != inf
            sleep_s = 1e-4 if self.copies_pending else WAKE_S
            if self._woken.wait(0.0 if awake else min(left_s, sleep_s)):
                self._woken.clear()
                return
            if left_s > WAKE_S and not awake and not self.copies_pending:
                return

    def wake(self) -> None:
        """Let `wait` return, now or the next time it is called. For other threads: a request may have arrived."""
        self._woken.set()

    # -- copies beside and behind the computation ------------------------------------------------------------------

    @property
    def copies_pending(self) -> bool:
        return len(self._transfers) > 0

    def ended_transfers(self) -> list[Move]:
        return self._transfers.take_ended()

    def _settle(self, seq: Sequence) -> None:
        """Wait for every copy of a sequence, which is about to give its blocks back."""
        self._transfers.wait(seq)
        self._tables.forget(seq)

    def _fail(self, seq: Sequence, reason: str) -> None:
        self._failures.append((seq, reason))

    def failures(self) -> list[tuple[Sequence, str]]:
        found, self._failures = self._failures, []
        return found

    # -- one iteration -------------------------------------------------------------------------------------------

    def execute(self, plan: IterationPlan) -> StepTimes:
        done = self.executed = Executed()
        num_tokens_of, placement = self.scheduler.batch.num_tokens_of, self.memory.placement
        copies, inputs, uncached = self.memory.copies, self.memory.inputs, self.memory.uncached
        decodes = [(seq, num_tokens_of(seq)) for seq in plan.decodes]
        for copy in placement.replay(plan, self._settle):
            # Before the computation, as vLLM 0.5.5 swaps: the same blocks may be written next.
            if isinstance(copy, StateRestore):
                self._restore(copy)
                continue
            done.add(copy)
            if copy.source:
                copies.wait(copy.seq, [copies.start(copy)])
        for move in plan.beside:
            done.add(self._transfers.begin(move))
        if plan.chunks or decodes:
            placement.grow((seq, cached + new) for seq, new, cached, _ in plan.chunks)
            placement.grow(decodes)
            if inputs is not None:
                inputs.begin(plan, decodes)
            if uncached is not None:
                uncached.begin(plan)
            self._compute_or_fail(plan, decodes)
            if uncached is not None:
                uncached.end()
        end_s = self.now_s()
        return StepTimes(1, end_s, 0.0, 0.0, end_s, 1)

    def _restore(self, copy: StateRestore) -> None:
        """Bring KV back from states; a sequence for which there is no memory fails at its next token."""
        states = self.memory.states
        assert states is not None
        try:
            self.executed.moves.append(states.restore(copy, self.tokens.of(copy.seq)))
        except torch.OutOfMemoryError as error:
            self._fail(copy.seq, f"out of memory: {str(error).splitlines()[0]}")
            self.executed.given_up.add(copy.seq)

    def _compute_or_fail(self, plan: IterationPlan, decodes: Seq[tuple[Sequence, int]]) -> None:
        """Compute; where memory runs out, part by part; a sequence whose part still does not fit fails."""
        try:
            self._compute(plan, plan.chunks, decodes)
        except torch.OutOfMemoryError:
            # The error holds the frames, and with them the tensors that filled the memory: leave it first.
            pass
        else:
            return
        parts: list[tuple[Seq[PrefillChunk], Seq[tuple[Sequence, int]]]] = [((chunk,), ()) for chunk in plan.chunks]
        parts += [((), (decode,)) for decode in decodes]
        for chunks, few in parts:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                self._compute(plan, chunks, few)
            except torch.OutOfMemoryError as error:
                self._give_up(plan, chunks, few, f"out of memory: {str(error).splitlines()[0]}")

    def _give_up(
        self, plan: IterationPlan, chunks: Seq[PrefillChunk], decodes: Seq[tuple[Sequence, int]], reason: str
    ) -> None:
        """A sequence that could not be computed: it fails, and the token that the engine counts is a filler."""
        sampled = [seq for seq, new, cached, _ in chunks if cached + new == seq.num_tokens]
        for seq in [*sampled, *(seq for seq, _ in decodes)]:
            self.tokens.append(seq, 0)
        self.executed.num_decodes += len(decodes)
        for seq in [*(chunk.seq for chunk in chunks), *(seq for seq, _ in decodes)]:
            self._fail(seq, reason)
            self.executed.given_up.add(seq)
            for move in plan.behind:
                if move.seq is seq and move.is_reported:
                    # Copies behind its prefill have nothing to copy: they are over.
                    self._transfers.begin_behind(move, [])

    def _compute(self, plan: IterationPlan, chunks: Seq[PrefillChunk], decodes: Seq[tuple[Sequence, int]]) -> None:
        if not chunks and self._replay(decodes):
            return
        work = self.memory.new_pass()
        spans = [(seq, cached, cached + num_new) for seq, num_new, cached, _ in chunks]
        spans += [(seq, num_tokens - 1, num_tokens) for seq, num_tokens in decodes]
        if self._caches_prefixes:
            spans = self.memory.placement.prefixes.to_compute(spans)
        for seq, first, end in spans[: len(chunks)]:
            work.add_chunk(seq, end - first, first, self.tokens.of(seq))
        for seq, first, end in spans[len(chunks) :]:
            work.add_decode(seq, end, self.tokens.of(seq), end - first)
        try:
            chosen = work.run(self.decoder, self.memory.gpu, self._tables, self._graph)
        except torch.OutOfMemoryError:
            work.abandon()
            self._note_loads(work)
            raise
        if self._caches_prefixes:
            self.memory.placement.prefixes.computed(spans)
            self._note_loads(work)
        self._finish_copies(plan, work)
        self.executed.num_decodes += len(decodes)
        self._emit(work.sampled, chosen)
        if not work.sampled:
            # Tokens are waited for; where there are none the iteration would seem to end with its launches.
            backend.finish(self.device)
        work.release()

    def _note_loads(self, work: LayerPass) -> None:
        """What a pass has loaded from the host's cache, or has failed to."""
        self.executed.num_read += work.num_loaded
        for seq, blocks in work.spoilt:
            self.memory.placement.prefixes.spoil(seq, blocks)

    def _replay(self, decodes: Seq[tuple[Sequence, int]]) -> bool:
        """Compute decodes whose KV is all on the GPU in a graph; False, and nothing is done, where that cannot be."""
        graph, unwritten = self._graph, self.memory.placement.cached.unwritten
        if graph is None or unwritten or not graph.fits(len(decodes), max(length for _, length in decodes)):
            return False
        seqs, lengths = [seq for seq, _ in decodes], [length for _, length in decodes]
        rows = self._tables.resident(seqs)
        if rows is None:
            return False
        tokens = [self.tokens.of(seq)[length - 1] for seq, length in decodes]
        chosen = greedy(graph.run(tokens, lengths, rows))
        if self._caches_prefixes:
            self.memory.placement.prefixes.computed([(seq, length - 1, length) for seq, length in decodes])
        self.executed.num_decodes += len(decodes)
        self._emit(seqs, chosen)
        return True

    def _finish_copies(self, plan: IterationPlan, work: LayerPass) -> None:
        """Copies behind a prefill's last chunk go on after it; what else a pass wrote must be out before its slots are
        reused, and before the next chunk reads it."""
        done, behind = self.executed, {move.seq: move for move in plan.behind}
        for member in work.members:
            done.num_read += member.num_read
            done.num_projected += member.num_projected * self.memory.gpu.block_tokens
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
                self.memory.copies.wait(seq, handles)

    # -- tokens --------------------------------------------------------------------------------------------------

    def named(self, request: Request) -> Request:
        return self.tokens.arrived(request, list(self.prompt_of(request)))

    def named_blocks(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        return self.tokens.named_blocks()

    def _emit(self, seqs: Seq[Sequence], chosen: Tensor) -> None:
        for seq, token in zip(seqs, chosen.tolist() if seqs else (), strict=True):
            self.tokens.append(seq, token)
            if self.on_token is not None:
                self.on_token(seq, token, self.now_s())

    def forget(self, seq: Sequence) -> None:
        self.tokens.forget(seq)

    def warm_up(self) -> None:
        """Run every kernel that serving may reach, on blocks nobody holds, and capture graphs: no request shall pay for
        set-up."""
        limits = self.scheduler.limits
        run_kernels(self.decoder, self.memory.gpu, limits)
        run_copies(self.memory.engine, self.memory.gpu, self.memory.host)
        if self._graph_batch_sizes and self.memory.beside is None:
            self._graph = DecodeGraph(
                self.decoder,
                self.memory.gpu,
                self._graph_batch_sizes,
                self.memory.placement.blocks_for(limits.max_model_len),
                by_layer=self.scheduler.stage.streams,
                capture=self._capture,
            )

    def close(self) -> None:
        """End the copy threads and give memory back: what is left of a run, this device with it, outlives the run."""
        self._graph = None
        self.memory.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- checks --------------------------------------------------------------------------------------------------

    def check_executed(self, plan: IterationPlan) -> None:
        """InvariantError unless the plan just executed was carried out block by block, and ids in use are what the
        scheduler counts. Before the plan is committed."""
        self.executed.check(plan)
        self.memory.check()
        self.memory.check_counts()
