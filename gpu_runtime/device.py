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
from gpu_runtime.executed import Executed, Moved
from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyEngine, CopyHandle
from gpu_runtime.kv.held import Transfer
from gpu_runtime.kv.placement import Placement
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.layer_inputs import LayerInputs
from gpu_runtime.layer_pass import BlockTables, LayerPass
from gpu_runtime.model import backend
from gpu_runtime.model.decode_graph import Capture, DecodeGraph
from gpu_runtime.model.decoder import Decoder, greedy
from gpu_runtime.saved_states import LiveStates, StateRestore
from gpu_runtime.warm_up import run_copies, run_kernels
from sim.engine.layers import SEND_BUFFER_LAYERS
from sim.engine.plan import Direction, IterationPlan, Move, PrefillChunk, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from sim.parts.memory.saved_states import SavedStates
from sim.parts.stage.partial_recompute import PartialRecompute
from traces.request import Request

PromptOf = Callable[[Request], Seq[int]]
"""The token ids of a request's prompt, as many as it has prompt tokens."""
OnToken = Callable[[Sequence, int, float], None]
"""Hears of every token: whose, which, and when, s."""
WAKE_S = 0.05
"""Longest sleep while nothing is known to happen, s."""


def scratch_blocks(scheduler: Scheduler) -> int:
    """GPU blocks beyond the scheduler's through which decodes with layers on the host pass.

    Each that may stream needs two layers' blocks, or one's where it has one layer on the host only.
    """
    if not scheduler.stage.streams:
        return 0
    limits = scheduler.limits
    longest = -(-limits.max_model_len // limits.block_size)
    # Who streams holds all its blocks, here or there.
    whole = min(limits.num_gpu_blocks + limits.num_cpu_blocks, limits.max_num_seqs * longest)
    return min(SEND_BUFFER_LAYERS * whole, scheduler.host.num_blocks)


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
        config, limits, memory = decoder.config, scheduler.limits, scheduler.memory
        memory.tell_blocks()
        self.decoder, self.scheduler = decoder, scheduler
        self.device = torch.device(device)
        self.prompt_of, self.on_token = prompt_of, on_token
        self.groups = memory.num_groups
        layer_group, left_over = divmod(config.num_layers, self.groups)
        if left_over:
            raise ValueError(f"{config.num_layers} layers of {config.name} in {self.groups} equal groups")
        self.block_tokens = limits.block_size
        gpu_blocks, host_blocks = memory.gpu.num_blocks, memory.host.num_blocks
        scratch = gpu_blocks + scratch_blocks(scheduler)
        pin = self.device.type == "cuda"
        self.gpu = KVPool(config, scratch + spare_blocks, limits.block_size, layer_group, self.device, dtype)
        # Blocks of states are not of KV alone.
        kv_blocks = 0 if isinstance(memory, SavedStates) else host_blocks
        self.host = KVPool(config, max(1, kv_blocks), limits.block_size, layer_group, "cpu", dtype, pin=pin)
        self.counted = BlockIds(gpu_blocks)
        self.scratch = BlockIds(scratch)
        # The first ids are those that the scheduler counts.
        self.scratch.allocate(gpu_blocks)
        self._num_scratch = self.scratch.num_free
        self.copies = CopyEngine(self.device, inline=not pin if inline_copies is None else inline_copies)
        self._moves = KVCopies(self.copies, self.gpu, self.host, self._fail)
        self.placement = Placement(self.counted, self.host, num_groups=self.groups, block_tokens=limits.block_size)
        self._states: LiveStates | None = None
        self._inputs: LayerInputs | None = None
        stage = scheduler.stage
        if isinstance(memory, SavedStates):
            self._states = LiveStates(memory, decoder, self.gpu, self.counted, self.copies, self._moves)
            self.placement = self._states.placement
        elif isinstance(stage, PartialRecompute) and stage.seconds.input_share:
            self._inputs = LayerInputs(decoder, self.host, self.placement, self.scratch, self._moves, self.copies)
        self._beside = self._states or self._inputs
        """What the host keeps beside KV, or in its place."""
        self._tables = BlockTables(self.placement)
        self.tokens: dict[Sequence, list[int]] = {}
        self._prompts: dict[int, list[int]] = {}
        self._hashes = BlockHashes(limits.block_size) if memory.caches_prefixes else None
        self.executed = Executed()
        """What the last iteration copied."""
        self._under_way: list[tuple[Transfer, list[CopyHandle]]] = []
        self._failures: list[tuple[Sequence, str]] = []
        self._graph_batch_sizes, self._capture = graph_batch_sizes, capture
        self._longest_blocks = self.placement.blocks_for(limits.max_model_len)
        self._graph: DecodeGraph | None = None
        self._stays_awake = stays_awake
        self._woken = Event()
        self._begun_s = perf_counter()

    # -- the clock -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Set the clock to zero."""
        self.copies.spans.start_clock()
        self._begun_s = perf_counter()

    def now_s(self) -> float:
        return perf_counter() - self._begun_s

    def wait(self, until_s: float) -> None:
        while True:
            left_s = until_s - self.now_s()
            if left_s <= 0 or any(_ended(handles) for _, handles in self._under_way):
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
        return bool(self._under_way)

    def ended_transfers(self) -> list[Move]:
        ended: list[Move] = []
        for entry in list(self._under_way):
            transfer, handles = entry
            if _ended(handles):
                if not self._moves.wait(transfer.move.seq, handles):
                    self.placement.hosted.lose(transfer.stored)
                self._under_way.remove(entry)
                self.placement.end(transfer)
                ended.append(transfer.move)
        return ended

    def _settle(self, seq: Sequence) -> None:
        """Wait for every copy of a sequence, which is about to give its blocks back."""
        for transfer, handles in self._under_way:
            if transfer.move.seq is seq:
                self._moves.wait(seq, handles)
        self._tables.forget(seq)

    def _fail(self, seq: Sequence, reason: str) -> None:
        self._failures.append((seq, reason))

    def failures(self) -> list[tuple[Sequence, str]]:
        found, self._failures = self._failures, []
        return found

    # -- one iteration -------------------------------------------------------------------------------------------

    def execute(self, plan: IterationPlan) -> StepTimes:
        done = self.executed = Executed()
        num_tokens_of, placement = self.scheduler.batch.num_tokens_of, self.placement
        decodes = [(seq, num_tokens_of(seq)) for seq in plan.decodes]
        for copy in placement.replay(plan, self._settle):
            # Before the computation, as vLLM 0.5.5 swaps: the same blocks may be written next.
            if isinstance(copy, StateRestore):
                self._restore(copy)
                continue
            done.add(copy)
            if copy.source:
                self._moves.wait(copy.seq, [self._moves.start(copy)])
        for move in plan.beside:
            transfer, copy = placement.begin(move)
            done.add(copy)
            self._under_way.append((transfer, [self._moves.start(copy)]))
        if plan.chunks or decodes:
            placement.grow((seq, cached + new) for seq, new, cached, _ in plan.chunks)
            placement.grow(decodes)
            if self._inputs is not None:
                self._inputs.begin(plan, decodes)
            self._compute_or_fail(plan, decodes)
        end_s = self.now_s()
        return StepTimes(1, end_s, 0.0, 0.0, end_s, 1)

    def _restore(self, copy: StateRestore) -> None:
        """Bring KV back from states; a sequence for which there is no memory fails at its next token."""
        assert self._states is not None
        try:
            self.executed.moves.append(self._states.restore(copy, self._tokens_of(copy.seq)))
        except torch.OutOfMemoryError as error:
            self._fail(copy.seq, f"out of memory: {str(error).splitlines()[0]}")
            self.executed.given_up.add(copy.seq)

    def _new_pass(self) -> LayerPass:
        return LayerPass(self.placement, self.scratch, self._moves) if self._beside is None else self._beside.new_pass()

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
            self._tokens_of(seq)
            self._append(seq, 0)
        self.executed.num_decodes += len(decodes)
        for seq in [*(chunk.seq for chunk in chunks), *(seq for seq, _ in decodes)]:
            self._fail(seq, reason)
            self.executed.given_up.add(seq)
            for move in plan.behind:
                if move.seq is seq and move.is_reported:
                    # Copies behind its prefill have nothing to copy: they are over.
                    self._under_way.append((self.placement.begin_behind(move), []))

    def _compute(self, plan: IterationPlan, chunks: Seq[PrefillChunk], decodes: Seq[tuple[Sequence, int]]) -> None:
        if not chunks and self._replay(decodes):
            return
        work = self._new_pass()
        spans = [(seq, cached, cached + num_new) for seq, num_new, cached, _ in chunks]
        spans += [(seq, num_tokens - 1, num_tokens) for seq, num_tokens in decodes]
        if self._hashes is not None:
            spans = self.placement.prefixes.to_compute(spans)
        for seq, first, end in spans[: len(chunks)]:
            work.add_chunk(seq, end - first, first, self._tokens_of(seq))
        for seq, first, end in spans[len(chunks) :]:
            work.add_decode(seq, end, self._tokens_of(seq), end - first)
        try:
            chosen = work.run(self.decoder, self.gpu, self._tables, self._graph)
        except torch.OutOfMemoryError:
            work.abandon()
            self._note_loads(work)
            raise
        if self._hashes is not None:
            self.placement.prefixes.computed(spans)
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
            self.placement.prefixes.spoil(seq, blocks)

    def _replay(self, decodes: Seq[tuple[Sequence, int]]) -> bool:
        """Compute decodes whose KV is all on the GPU in a graph; False, and nothing is done, where that cannot be."""
        graph, unwritten = self._graph, self.placement.cached.unwritten
        if graph is None or unwritten or not graph.fits(len(decodes), max(length for _, length in decodes)):
            return False
        seqs, lengths = [seq for seq, _ in decodes], [length for _, length in decodes]
        rows = self._tables.resident(seqs)
        if rows is None:
            return False
        tokens = [self._tokens_of(seq)[length - 1] for seq, length in decodes]
        chosen = greedy(graph.run(tokens, lengths, rows))
        if self._hashes is not None:
            self.placement.prefixes.computed([(seq, length - 1, length) for seq, length in decodes])
        self.executed.num_decodes += len(decodes)
        self._emit(seqs, chosen)
        return True

    def _tokens_of(self, seq: Sequence) -> list[int]:
        tokens = self.tokens.get(seq)
        if tokens is None:
            tokens = self.tokens[seq] = self._prompts.pop(seq.request.request_id)
        return tokens

    def _finish_copies(self, plan: IterationPlan, work: LayerPass) -> None:
        """Copies behind a prefill's last chunk go on after it; what else a pass wrote must be out before its slots are
        reused, and before the next chunk reads it."""
        done, behind = self.executed, {move.seq: move for move in plan.behind}
        for member in work.members:
            done.num_read += member.num_read
            done.num_projected += member.num_projected * self.block_tokens
            done.num_saved += member.num_saved
            seq, handles, move = member.seq, list(member.leaving.values()), behind.get(member.seq)
            if move is None:
                done.num_written += member.num_sent
            else:
                done.behind.append(Moved(seq, tuple(member.leaving), Direction.D2H, member.num_sent))
            if move is not None and move.is_reported:
                self._under_way.append((self.placement.begin_behind(move), handles))
            else:
                self._moves.wait(seq, handles)

    # -- tokens --------------------------------------------------------------------------------------------------

    def named(self, request: Request) -> Request:
        prompt = self._prompts[request.request_id] = list(self.prompt_of(request))
        return request if self._hashes is None else self._hashes.named(request, prompt)

    def named_blocks(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        return [] if self._hashes is None else self._hashes.take()

    def _append(self, seq: Sequence, token: int) -> None:
        tokens = self.tokens[seq]
        tokens.append(token)
        if self._hashes is not None:
            self._hashes.grown(seq, tokens)

    def _emit(self, seqs: Seq[Sequence], chosen: Tensor) -> None:
        for seq, token in zip(seqs, chosen.tolist() if seqs else (), strict=True):
            self._append(seq, token)
            if self.on_token is not None:
                self.on_token(seq, token, self.now_s())

    def forget(self, seq: Sequence) -> None:
        self.tokens.pop(seq, None)
        self._prompts.pop(seq.request.request_id, None)
        if self._hashes is not None:
            self._hashes.forget(seq)

    def warm_up(self) -> None:
        """Run every kernel that serving may reach, on blocks nobody holds, and capture graphs: no request shall pay for
        set-up."""
        run_kernels(self.decoder, self.gpu, self.scheduler.limits)
        run_copies(self.copies, self.gpu, self.host)
        if self._graph_batch_sizes and self._beside is None:
            self._graph = DecodeGraph(
                self.decoder,
                self.gpu,
                self._graph_batch_sizes,
                self._longest_blocks,
                by_layer=self.scheduler.stage.streams,
                capture=self._capture,
            )

    def close(self) -> None:
        """End the copy threads and give memory back: what is left of a run, this device with it, outlives the run."""
        self.copies.close()
        self._graph = None
        self.gpu.release()
        self.host.release()
        if self._beside is not None:
            self._beside.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """InvariantError unless the ids balance: nobody holds a block twice, and pools list each free block once."""
        self.placement.check()
        self.counted.check()
        self.placement.host.check()
        if self.scratch.num_free != self._num_scratch:
            raise InvariantError(f"{self._num_scratch - self.scratch.num_free} scratch blocks were not given back")

    def check_executed(self, plan: IterationPlan) -> None:
        """InvariantError unless the plan just executed was carried out block by block, and ids in use are what the
        scheduler counts. Before the plan is committed."""
        self.executed.check(plan)
        self.check()
        self.check_counts()

    def check_counts(self) -> None:
        """InvariantError unless as many ids are in use as the scheduler counts. When it has no changes to tell."""
        memory = self.scheduler.memory
        for pool, ids, reserved in (
            (memory.gpu, self.counted, 0),
            # Set aside for the coming step, and nobody's.
            (memory.host, self.placement.host, memory.host_reserved - memory.num_cached_on_host),
        ):
            idle = self.placement.cached.num_blocks if ids is self.counted else 0
            used, counted = ids.num_blocks - ids.num_free - idle, pool.num_blocks - pool.free - reserved
            if used != counted:
                raise InvariantError(f"{pool.name}: {used} ids are in use, {counted} blocks are counted")


def _ended(handles: Seq[CopyHandle]) -> bool:
    return all(handle.done() for handle in handles)
