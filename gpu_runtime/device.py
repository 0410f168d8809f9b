"""`TorchDevice`: executes plans with torch and measures. The real clock's half of what the simulator prices.

One iteration: blocks are brought in line with the scheduler's decisions, copies that must come first are made,
background copies start, then the layers run one after the other. Layer l waits only for the copies it needs: KV that
streams in from the host, or the send-buffer slot that its own KV leaves through (LayerKV section 3.1.2).
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter, sleep

import torch
from torch import Tensor

from gpu_runtime.attention_batch import AttentionBatch
from gpu_runtime.block_ids import BlockIds
from gpu_runtime.copy_engine import CopyEngine, CopyHandle
from gpu_runtime.decoder import Decoder, greedy
from gpu_runtime.kv_pool import KVPool
from gpu_runtime.placement import Move, Placement
from sim.lanes import SEND_BUFFER_LAYERS
from sim.plan import Direction, IterationPlan, StepTimes, Transfer
from sim.policies.base import Limits, Scheduler
from sim.sequence import Sequence
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
    coming: dict[tuple[int, int], CopyHandle] = field(default_factory=dict)
    """By sequence and group, the copy into a slot."""


class TorchDevice:
    """A decoder, two pools of KV blocks, copy streams and a clock.

    Args:
        decoder: the model.
        scheduler: of the engine this device serves; read, never changed.
        limits: sizes of the pools, in whole blocks.
        layer_group: layers a block holds: all for vLLM's policies, 1 for LayerKV's.
        prompt_of: token ids of a request's prompt.
        on_token: hears of every token.
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
        self._reserved = self.scratch.allocate(gpu_blocks)
        self.placement = Placement(
            self.counted, self.host, self.scratch, num_groups=self.groups, block_tokens=limits.block_size
        )
        self.copies = CopyEngine(self.device)
        self.tokens: dict[Sequence, list[int]] = {}
        self._background: list[tuple[Transfer, CopyHandle]] = []
        self._behind: list[tuple[Transfer, list[CopyHandle]]] = []
        self._open_copies: dict[Sequence, list[CopyHandle]] = {}
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
            sleep(min(left_s, 1e-4 if self.copies_pending else WAKE_S))
            if left_s > WAKE_S and not self.copies_pending:
                return

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
                handle.wait()
                self._background.remove((transfer, handle))
                self.placement.end(transfer)
                ended.append(transfer)
        for transfer, handles in list(self._behind):
            if all(handle.done() for handle in handles):
                for handle in handles:
                    handle.wait()
                self._behind.remove((transfer, handles))
                self.placement.end_prefill(transfer.seq)
                ended.append(transfer)
        return ended

    def _settle(self, seq: Sequence) -> None:
        """Wait for every copy of a sequence, whose blocks are about to be given to others."""
        for handle in self._open_copies.pop(seq, ()):
            handle.wait()
        for transfer, handle in self._background:
            if transfer.seq is seq:
                handle.wait()

    def _copy(self, move: Move) -> CopyHandle:
        pools = (self.gpu, self.host) if move.direction is Direction.D2H else (self.host, self.gpu)
        return self.copies.copy_blocks(pools[0], move.source, pools[1], move.target, move.direction)

    # -- one iteration -------------------------------------------------------------------------------------------

    def execute(self, plan: IterationPlan) -> StepTimes:
        decodes = list(self._decodes(plan))
        for move in self.placement.follow(plan, decodes, self._settle):
            # On the computation's stream, as vLLM 0.5.5 swaps: the same blocks may be written next.
            self._copy(move).wait()
        for transfer in plan.background:
            self._background.append((transfer, self._copy(self.placement.begin(transfer))))
        if plan.chunks or decodes:
            self._compute(plan, decodes)
        end_s = self.now_s()
        self._forget_ended()
        return StepTimes(1, end_s, 0.0, 0.0, end_s)

    def _decodes(self, plan: IterationPlan) -> Iterator[tuple[Sequence, int]]:
        batch = self.scheduler.batch
        members = islice(batch.members, plan.num_decodes) if plan.decodes_first else iter(batch.members)
        if plan.num_decodes:
            for seq in members:
                yield seq, batch.num_tokens_of(seq)

    def _compute(self, plan: IterationPlan, decodes: Seq[tuple[Sequence, int]]) -> None:
        work, ids, sampled = self._lay_out(plan, decodes)
        tables = self._tables(work)
        batch = AttentionBatch.build(work.num_new, work.cached, tables, self.block_tokens, self.device)
        rows = batch.last_rows[torch.tensor(sampled, device=self.device)] if sampled else None
        logits = self.decoder.forward(
            torch.tensor(ids, device=self.device),
            batch,
            self.gpu,
            rows,
            before_layer=lambda layer: self._before_layer(work, layer),
            after_layer=lambda layer, _: self._after_layer(work, layer),
        )
        self._finish_behind(plan, work)
        if logits is not None and sampled:
            self._emit([work.seqs[i] for i in sampled], greedy(logits))
        self._release_scratch(work)

    def _lay_out(self, plan: IterationPlan, decodes: Seq[tuple[Sequence, int]]) -> tuple[Pass, list[int], list[int]]:
        """The pass, the token ids it feeds, and which of its sequences are sampled."""
        work, ids, sampled = Pass([], [], [], [], []), [], []
        for seq, num_new, cached, _ in plan.chunks:
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

    def _tables(self, work: Pass) -> list[list[list[int]]]:
        """Block ids by group and sequence: its own, or the slot its group passes through."""
        return [
            [self.placement.table(seq, group, work.slots[i]) for i, seq in enumerate(work.seqs)]
            for group in range(self.groups)
        ]

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
                out.wait()
            if work.streaming[i] and work.cached[i]:
                blocks = self.placement.blocks_for(work.cached[i])
                source = held.host[layer][:blocks]
                target = work.slots[i][turn % len(work.slots[i])][:blocks]
                self._copy(Move(Direction.H2D, tuple(source), tuple(target))).wait()

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
            work.leaving[i, turn] = self._copy(Move(Direction.D2H, tuple(source), tuple(target)))

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
            for handle in handles:
                handle.wait()

    # -- tokens --------------------------------------------------------------------------------------------------

    def _emit(self, seqs: Seq[Sequence], chosen: Tensor) -> None:
        for seq, token in zip(seqs, chosen.tolist(), strict=True):
            self.tokens[seq].append(token)
            if self.on_token is not None:
                self.on_token(seq, token, self.now_s())

    def warm_up(self) -> None:
        """Run a prompt and a decode on blocks nobody holds, so that the first request does not pay for lazy set-up."""
        tokens = min(8, self.block_tokens * max(1, self.counted.num_free // self.groups // 2))
        held = [self.counted.allocate(self._blocks(tokens + 1)) for _ in range(self.groups)]
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

    def _blocks(self, num_tokens: int) -> int:
        return self.placement.blocks_for(num_tokens)

    def _forget_ended(self) -> None:
        """Drop the copies' handles of sequences that hold nothing any more."""
        for seq in [seq for seq in self._open_copies if seq not in self.placement.held]:
            del self._open_copies[seq]

    def check(self) -> None:
        """InvariantError unless the ids balance: nobody holds a block twice, and pools list each free block once."""
        self.placement.check()
        self.counted.check()
        self.host.check()
