"""`TorchDevice`: executes plans with torch and measures. The real clock's half of what the simulator prices.

One iteration: blocks are brought in line with the scheduler's decisions, copies that must come first are made,
background copies start, then the layers run (`layer_pass`): one after the other, or where nothing happens between them
as a captured graph.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from math import inf
from threading import Event
from time import perf_counter

import torch
from torch import Tensor

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyEngine, CopyHandle
from gpu_runtime.kv.placement import Placement
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.layer_pass import BlockTables, LayerPass
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decode_graph import Capture, DecodeGraph
from gpu_runtime.model.decoder import Decoder, greedy
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan, PrefillChunk, StepTimes, Transfer
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence, Status
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
        scheduler: of the engine this device serves; read, never changed.
        limits: sizes of the pools, in whole blocks.
        layer_group: layers a block holds: all for vLLM's policies, 1 for LayerKV's.
        prompt_of: token ids of a request's prompt.
        on_token: hears of every token.
        scratch_blocks: GPU blocks beyond the scheduler's, through which decodes with layers on the host pass.
        stays_awake: wait for a known time without sleeping. An idle core loses its caches to others and its clock to
            power saving, and its next iteration may take half as long again.
        inline_copies: whether the computing thread copies, as it does on a CPU by default.
        graph_batch_sizes: batches of decodes that `warm_up` captures as graphs (`decode_graph.capture_sizes`).
        capture: makes the graphs; None: as CUDA graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler,
        limits: Limits,
        *,
        layer_group: int,
        prompt_of: PromptOf,
        device: torch.device | str,
        dtype: torch.dtype,
        on_token: OnToken | None = None,
        scratch_blocks: int = 0,
        stays_awake: bool = False,
        inline_copies: bool | None = None,
        graph_batch_sizes: Seq[int] = (),
        capture: Capture | None = None,
    ) -> None:
        config = decoder.config
        self.decoder, self.scheduler = decoder, scheduler
        self.device = torch.device(device)
        self.prompt_of, self.on_token = prompt_of, on_token
        self.groups = -(-config.num_layers // layer_group)
        self.block_tokens = limits.block_size
        gpu_blocks, host_blocks = limits.num_gpu_blocks * self.groups, limits.num_cpu_blocks * self.groups
        total = gpu_blocks + scratch_blocks
        pin = self.device.type == "cuda"
        self.gpu = KVPool(config, total, limits.block_size, layer_group, self.device, dtype)
        self.host = KVPool(config, max(1, host_blocks), limits.block_size, layer_group, "cpu", dtype, pin=pin)
        self.counted = BlockIds(gpu_blocks)
        self.scratch = BlockIds(total)
        # The first ids are those that the scheduler counts.
        self.scratch.allocate(gpu_blocks)
        self.placement = Placement(self.counted, self.host, num_groups=self.groups, block_tokens=limits.block_size)
        self.copies = CopyEngine(self.device, inline=not pin if inline_copies is None else inline_copies)
        self._moves = KVCopies(self.copies, self.gpu, self.host, self._fail)
        self._tables = BlockTables(self.placement)
        self.tokens: dict[Sequence, list[int]] = {}
        self._background: list[tuple[Transfer, CopyHandle]] = []
        self._behind: list[tuple[Transfer, list[CopyHandle]]] = []
        self._open_copies: dict[Sequence, list[CopyHandle]] = {}
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
            if left_s <= 0 or any(handle.done() for _, handle in self._background) or self._behind_ended():
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

    def _behind_ended(self) -> bool:
        return any(all(handle.done() for handle in handles) for _, handles in self._behind)

    # -- copies beside the computation ---------------------------------------------------------------------------

    @property
    def copies_pending(self) -> bool:
        return bool(self._background or self._behind)

    def ended_transfers(self) -> list[Transfer]:
        ended: list[Transfer] = []
        for transfer, handle in list(self._background):
            if handle.done():
                self._moves.wait(transfer.seq, [handle])
                self._background.remove((transfer, handle))
                self.placement.end(transfer)
                ended.append(transfer)
        for transfer, handles in list(self._behind):
            if all(handle.done() for handle in handles):
                self._moves.wait(transfer.seq, handles)
                self._behind.remove((transfer, handles))
                self.placement.end_prefill(transfer.seq)
                ended.append(transfer)
        return ended

    def _settle(self, seq: Sequence) -> None:
        """Wait for every copy of a sequence, whose blocks are about to be given to others."""
        handles = [handle for transfer, handle in self._background if transfer.seq is seq]
        self._moves.wait(seq, [*self._open_copies.pop(seq, ()), *handles])

    def _fail(self, seq: Sequence, reason: str) -> None:
        self._failures.append((seq, reason))

    def failures(self) -> list[tuple[Sequence, str]]:
        found, self._failures = self._failures, []
        return found

    # -- one iteration -------------------------------------------------------------------------------------------

    def execute(self, plan: IterationPlan) -> StepTimes:
        decodes = list(self._decodes(plan))
        for move in self.placement.follow(plan, decodes, self._settle):
            # Before the computation, as vLLM 0.5.5 swaps: the same blocks may be written next.
            self._moves.wait(move.seq, [self._moves.start(move)])
        for transfer in plan.background:
            self._background.append((transfer, self._moves.start(self.placement.begin(transfer))))
        if plan.chunks or decodes:
            self._compute_or_fail(plan, decodes)
        end_s = self.now_s()
        self._forget_ended()
        return StepTimes(1, end_s, 0.0, 0.0, end_s)

    def _decodes(self, plan: IterationPlan) -> Iterator[tuple[Sequence, int]]:
        batch = self.scheduler.batch
        members = islice(batch.members, plan.num_decodes) if plan.decodes_first else iter(batch.members)
        if plan.num_decodes:
            for seq in members:
                yield seq, batch.num_tokens_of(seq)

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
            self._tokens_of(seq).append(0)
        for seq in [*(chunk.seq for chunk in chunks), *(seq for seq, _ in decodes)]:
            self._fail(seq, reason)
            # Copies behind its prefill have nothing to copy: they are over.
            self._behind += [(transfer, []) for transfer in plan.pipelined_d2h if transfer.seq is seq]

    def _compute(self, plan: IterationPlan, chunks: Seq[PrefillChunk], decodes: Seq[tuple[Sequence, int]]) -> None:
        work = LayerPass(self.placement, self.scratch, self._moves)
        for seq, num_new, cached, _ in chunks:
            work.add_chunk(seq, num_new, cached, self._tokens_of(seq))
        for seq, num_tokens in decodes:
            work.add_decode(seq, num_tokens, self._tokens_of(seq))
        try:
            chosen = work.run(self.decoder, self.gpu, self._tables, self._graph)
        except torch.OutOfMemoryError:
            work.abandon()
            raise
        self._finish_behind(plan, work)
        self._emit(work.sampled, chosen)
        work.release()

    def _tokens_of(self, seq: Sequence) -> list[int]:
        tokens = self.tokens.get(seq)
        if tokens is None:
            tokens = self.tokens[seq] = list(self.prompt_of(seq.request))
        return tokens

    def _finish_behind(self, plan: IterationPlan, work: LayerPass) -> None:
        """Copies behind a prefill go on after it; what else a pass wrote must be out before its slots are reused."""
        behind = {transfer.seq: transfer for transfer in plan.pipelined_d2h}
        for member in work.members:
            seq, handles = member.seq, list(member.leaving.values())
            if seq in behind:
                self._behind.append((behind[seq], handles))
                self._open_copies[seq] = handles
            else:
                self._moves.wait(seq, handles)

    # -- tokens --------------------------------------------------------------------------------------------------

    def _emit(self, seqs: Seq[Sequence], chosen: Tensor) -> None:
        if not seqs:
            return
        for seq, token in zip(seqs, chosen.tolist(), strict=True):
            self.tokens[seq].append(token)
            if self.on_token is not None:
                self.on_token(seq, token, self.now_s())

    def warm_up(self) -> None:
        """Run a prompt and a decode on blocks nobody holds, and capture graphs: no request shall pay for set-up."""
        tokens = min(8, self.block_tokens * max(1, self.counted.num_free // self.groups // 2))
        held = [self.counted.allocate(self.placement.blocks_for(tokens + 1)) for _ in range(self.groups)]
        tables = [[ids] for ids in held]
        for new, cached in ((tokens, 0), (1, tokens)):
            batch = AttentionBatch.build([new], [cached], tables, self.block_tokens, self.device)
            logits = self.decoder.forward(torch.zeros(new, dtype=torch.int64, device=self.device), batch, self.gpu)
            greedy(logits).tolist()
        for ids in held:
            self.counted.free(ids)
        if self._graph_batch_sizes:
            self._graph = DecodeGraph(
                self.decoder, self.gpu, self._graph_batch_sizes, self._longest_blocks, capture=self._capture
            )

    def close(self) -> None:
        """End the copy threads."""
        self.copies.close()

    def _forget_ended(self) -> None:
        """Forget what is known of sequences whose blocks have been given back; a preempted one keeps its tokens."""
        for seq in self.placement.take_dropped():
            self._open_copies.pop(seq, None)
            self._tables.forget(seq)
            if seq.status in (Status.FINISHED, Status.IGNORED):
                self.tokens.pop(seq, None)

    def check(self) -> None:
        """InvariantError unless the ids balance: nobody holds a block twice, and pools list each free block once."""
        self.placement.check()
        self.counted.check()
        self.host.check()
