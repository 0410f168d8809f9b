"""`TorchDevice`: executes plans with torch and measures. The real clock's half of what the simulator prices.

One iteration: blocks are brought in line with the scheduler's decisions, copies that must come first are made,
background copies start, then the layers run one after the other. Layer l waits only for the copies it needs: KV that
streams in from the host, or the send-buffer slot that its own KV leaves through (LayerKV section 3.1.2).
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from threading import Event
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from gpu_runtime.attention_batch import AttentionBatch
from gpu_runtime.block_ids import BlockIds
from gpu_runtime.copy_engine import CopyEngine, CopyFailed, CopyHandle
from gpu_runtime.decoder import Decoder, greedy
from gpu_runtime.kv_pool import KVPool
from gpu_runtime.placement import Held, Move, Placement
from sim.lanes import SEND_BUFFER_LAYERS
from sim.plan import Direction, IterationPlan, PrefillChunk, StepTimes, Transfer
from sim.policies.base import Limits, Scheduler
from sim.sequence import Sequence, Status
from traces.request import Request

PromptOf = Callable[[Request], Seq[int]]
"""The token ids of a request's prompt, as many as it has prompt tokens."""
OnToken = Callable[[Sequence, int, float], None]
"""Hears of every token: whose, which, and when, s."""
WAKE_S = 0.05
"""Longest sleep while nothing is known to happen, s."""


@dataclass
class Pass:
    """One run over the layers: who computes, where each one's KV is, and the copies its layers wait for."""

    seqs: list[Sequence]
    num_new: list[int]
    cached: list[int]
    slots: list[list[list[int]]]
    """Per sequence, the GPU blocks that its groups on the host pass through, in turn; empty if it has none."""
    streaming: list[bool]
    """Whether the KV cached before must come from the host for each group."""
    leaving: dict[tuple[int, int], CopyHandle] = field(default_factory=dict)
    """By sequence and turn, the copy out of a slot."""


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
        self.tokens: dict[Sequence, list[int]] = {}
        self._background: list[tuple[Transfer, CopyHandle]] = []
        self._behind: list[tuple[Transfer, list[CopyHandle]]] = []
        self._open_copies: dict[Sequence, list[CopyHandle]] = {}
        self._failures: list[tuple[Sequence, str]] = []
        self._known_rows: dict[Sequence, tuple[Held, int, np.ndarray]] = {}
        self._stays_awake = stays_awake
        self._woken = Event()
        self._begun_s = perf_counter()

    # -- the clock -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Set the clock to zero."""
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
                self._check_copies(transfer.seq, [handle])
                self._background.remove((transfer, handle))
                self.placement.end(transfer)
                ended.append(transfer)
        for transfer, handles in list(self._behind):
            if all(handle.done() for handle in handles):
                self._check_copies(transfer.seq, handles)
                self._behind.remove((transfer, handles))
                self.placement.end_prefill(transfer.seq)
                ended.append(transfer)
        return ended

    def _settle(self, seq: Sequence) -> None:
        """Wait for every copy of a sequence, whose blocks are about to be given to others."""
        handles = [handle for transfer, handle in self._background if transfer.seq is seq]
        self._check_copies(seq, [*self._open_copies.pop(seq, ()), *handles])

    def _check_copies(self, seq: Sequence, handles: Iterable[CopyHandle]) -> None:
        """Wait for copies; one that failed has lost the sequence's KV, which ends the sequence and nobody else."""
        for handle in handles:
            try:
                handle.wait()
            except CopyFailed as error:
                self._failures.append((seq, f"copy of KV blocks: {error}"))

    def _await(self, seq: Sequence, handle: CopyHandle, layer: int) -> None:
        """Let the computation's stream wait for a copy; the host goes on queueing layers."""
        try:
            handle.wait_layer(layer)
        except CopyFailed as error:
            self._failures.append((seq, f"copy of KV blocks: {error}"))

    def failures(self) -> list[tuple[Sequence, str]]:
        found, self._failures = self._failures, []
        return found

    def _copy(self, move: Move) -> CopyHandle:
        pools = (self.gpu, self.host) if move.direction is Direction.D2H else (self.host, self.gpu)
        return self.copies.copy_blocks(pools[0], move.source, pools[1], move.target, move.direction)

    # -- one iteration -------------------------------------------------------------------------------------------

    def execute(self, plan: IterationPlan) -> StepTimes:
        decodes = list(self._decodes(plan))
        for move in self.placement.follow(plan, decodes, self._settle):
            # Before the computation, as vLLM 0.5.5 swaps: the same blocks may be written next.
            self._check_copies(move.seq, [self._copy(move)])
        for transfer in plan.background:
            self._background.append((transfer, self._copy(self.placement.begin(transfer))))
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
            self._failures.append((seq, reason))
            # Copies behind its prefill have nothing to copy: they are over.
            self._behind += [(transfer, []) for transfer in plan.pipelined_d2h if transfer.seq is seq]

    def _compute(self, plan: IterationPlan, chunks: Seq[PrefillChunk], decodes: Seq[tuple[Sequence, int]]) -> None:
        work, ids, sampled = self._lay_out(chunks, decodes)
        try:
            batch = AttentionBatch.build(work.num_new, work.cached, self._tables(work), self.block_tokens, self.device)
            rows = batch.last_rows[torch.tensor(sampled, device=self.device)] if sampled else None
            logits = self.decoder.forward(
                torch.tensor(ids, device=self.device),
                batch,
                self.gpu,
                rows,
                before_layer=lambda layer: self._before_layer(work, layer),
                after_layer=lambda layer, _: self._after_layer(work, layer),
            )
            chosen = greedy(logits)
        except torch.OutOfMemoryError:
            for (i, _), handle in work.leaving.items():
                self._check_copies(work.seqs[i], [handle])
            self._release_scratch(work)
            raise
        self._finish_behind(plan, work)
        if sampled:
            self._emit([work.seqs[i] for i in sampled], chosen)
        self._release_scratch(work)

    def _lay_out(
        self, chunks: Seq[PrefillChunk], decodes: Seq[tuple[Sequence, int]]
    ) -> tuple[Pass, list[int], list[int]]:
        """The pass, the token ids it feeds, and which of its sequences are sampled."""
        work, ids, sampled = Pass([], [], [], [], []), [], []
        for seq, num_new, cached, _ in chunks:
            tokens = self._tokens_of(seq)
            ids += tokens[cached : cached + num_new]
            if cached + num_new == seq.num_tokens:
                sampled.append(len(work.seqs))
            self._add(work, seq, num_new, cached, self.placement.held[seq].slots, streams=cached > 0)
        for seq, num_tokens in decodes:
            ids.append(self._tokens_of(seq)[num_tokens - 1])
            sampled.append(len(work.seqs))
            slots = self._scratch_slots(seq, num_tokens) if self.placement.held[seq].host else []
            self._add(work, seq, 1, num_tokens - 1, slots, streams=True)
        return work, ids, sampled

    def _add(
        self, work: Pass, seq: Sequence, num_new: int, cached: int, slots: list[list[int]], *, streams: bool
    ) -> None:
        work.seqs.append(seq)
        work.num_new.append(num_new)
        work.cached.append(cached)
        work.slots.append(slots if self.placement.held[seq].host else [])
        work.streaming.append(bool(work.slots[-1]) and streams)

    def _tokens_of(self, seq: Sequence) -> list[int]:
        tokens = self.tokens.get(seq)
        if tokens is None:
            tokens = self.tokens[seq] = list(self.prompt_of(seq.request))
        return tokens

    def _scratch_slots(self, seq: Sequence, num_tokens: int) -> list[list[int]]:
        blocks = self.placement.blocks_for(num_tokens)
        slots = min(SEND_BUFFER_LAYERS, len(self.placement.held[seq].host))
        return [self.scratch.allocate(blocks) for _ in range(slots)]

    def _release_scratch(self, work: Pass) -> None:
        for i, seq in enumerate(work.seqs):
            if work.slots[i] and work.slots[i] is not self.placement.held[seq].slots:
                for ids in work.slots[i]:
                    self.scratch.free(ids)

    def _tables(self, work: Pass) -> np.ndarray:
        """Block ids [groups, sequences, blocks], int32: a sequence's own, or the slot its group passes through."""
        rows = [self._rows(seq, work.slots[i]) for i, seq in enumerate(work.seqs)]
        tables = np.zeros((self.groups, len(rows), max(row.shape[1] for row in rows)), dtype=np.int32)
        for i, row in enumerate(rows):
            tables[:, i, : row.shape[1]] = row
        return tables

    def _rows(self, seq: Sequence, slots: Seq[list[int]]) -> np.ndarray:
        """Block ids [groups, blocks] of one sequence, kept until they change."""
        held = self.placement.held[seq]
        known = self._known_rows.get(seq)
        if known is not None and known[0] is held and known[1] == held.version and not slots:
            return known[2]
        rows = np.array([self.placement.table(seq, group, slots) for group in range(self.groups)], dtype=np.int32)
        if not slots:
            self._known_rows[seq] = held, held.version, rows
        return rows

    # -- around each layer (groups of one layer: only LayerKV has sequences with slots) -------------------------------

    def _before_layer(self, work: Pass, layer: int) -> None:
        """Wait until the slots of this layer are free and hold what was cached before."""
        for i, seq in enumerate(work.seqs):
            held = self.placement.held[seq]
            if not work.slots[i] or layer in held.gpu:
                continue
            turn = self.placement.turn(seq, layer)
            out = work.leaving.get((i, turn - len(work.slots[i])))
            if out is not None:
                self._await(seq, out, layer)
            if work.streaming[i] and work.cached[i]:
                blocks = self.placement.blocks_for(work.cached[i])
                source = held.host[layer][:blocks]
                target = work.slots[i][turn % len(work.slots[i])][:blocks]
                self._await(seq, self._copy(Move(seq, Direction.H2D, tuple(source), tuple(target))), layer)

    def _after_layer(self, work: Pass, layer: int) -> None:
        """Send what the layer has written to the host, through its slot."""
        for i, seq in enumerate(work.seqs):
            held = self.placement.held[seq]
            if not work.slots[i] or layer in held.gpu:
                continue
            turn = self.placement.turn(seq, layer)
            first = work.cached[i] // self.block_tokens
            blocks = self.placement.blocks_for(work.cached[i] + work.num_new[i])
            source = work.slots[i][turn % len(work.slots[i])][first:blocks]
            target = held.host[layer][first:blocks]
            work.leaving[i, turn] = self._copy(Move(seq, Direction.D2H, tuple(source), tuple(target)))

    def _finish_behind(self, plan: IterationPlan, work: Pass) -> None:
        """Copies behind a prefill go on after it; what else a pass wrote must be out before its slots are reused."""
        behind = {transfer.seq: transfer for transfer in plan.pipelined_d2h}
        by_seq: dict[int, list[CopyHandle]] = {}
        for (i, _), handle in work.leaving.items():
            by_seq.setdefault(i, []).append(handle)
        for i, seq in enumerate(work.seqs):
            handles = by_seq.get(i, [])
            if seq in behind:
                self._behind.append((behind[seq], handles))
                self._open_copies[seq] = handles
                continue
            self._check_copies(seq, handles)

    # -- tokens --------------------------------------------------------------------------------------------------

    def _emit(self, seqs: Seq[Sequence], chosen: Tensor) -> None:
        for seq, token in zip(seqs, chosen.tolist(), strict=True):
            self.tokens[seq].append(token)
            if self.on_token is not None:
                self.on_token(seq, token, self.now_s())

    def warm_up(self) -> None:
        """Run a prompt and a decode on blocks nobody holds, so that the first request does not pay for lazy set-up."""
        tokens = min(8, self.block_tokens * max(1, self.counted.num_free // self.groups // 2))
        held = [self.counted.allocate(self.placement.blocks_for(tokens + 1)) for _ in range(self.groups)]
        tables = [[ids] for ids in held]
        for new, cached in ((tokens, 0), (1, tokens)):
            batch = AttentionBatch.build([new], [cached], tables, self.block_tokens, self.device)
            logits = self.decoder.forward(torch.zeros(new, dtype=torch.int64, device=self.device), batch, self.gpu)
            greedy(logits).tolist()
        for ids in held:
            self.counted.free(ids)

    def close(self) -> None:
        """End the copy threads."""
        self.copies.close()

    def _forget_ended(self) -> None:
        """Forget what is known of sequences whose blocks have been given back; a preempted one keeps its tokens."""
        for seq in self.placement.take_dropped():
            self._open_copies.pop(seq, None)
            self._known_rows.pop(seq, None)
            if seq.status in (Status.FINISHED, Status.IGNORED):
                self.tokens.pop(seq, None)

    def check(self) -> None:
        """InvariantError unless the ids balance: nobody holds a block twice, and pools list each free block once."""
        self.placement.check()
        self.counted.check()
        self.host.check()
