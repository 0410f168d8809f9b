"""`Placement`: which physical blocks hold which layers of which sequence. The ids behind the scheduler's counts.

The scheduler counts blocks and decides; here those decisions become block ids and copies. A *group* is what a block
holds of the layers: all of them for vLLM, one for LayerKV. Placement reads a sequence's status and counts after each
schedule, before the plan is executed, and says which copies must happen before, behind and beside the computation.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from sim.cost.lanes import SEND_BUFFER_LAYERS, retained_layers
from sim.engine.plan import Direction, IterationPlan, Transfer
from sim.engine.sequence import Sequence, Status
from sim.errors import InvariantError


class Blocks(Protocol):
    """A pool of block ids (`gpu_runtime.kv.block_ids.BlockIds`, `gpu_runtime.kv.pool.KVPool`)."""

    def allocate(self, n: int) -> list[int]:
        """Take `n` ids."""
        ...

    def free(self, ids: Iterable[int]) -> None:
        """Give ids back."""
        ...


@dataclass(frozen=True)
class Move:
    """A copy of a sequence's blocks between the tiers, id by id."""

    seq: Sequence
    direction: Direction
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass
class Held:
    """What one sequence holds: ids by group on each tier; `slots` are the send buffer of a prefill, a list each."""

    gpu: dict[int, list[int]] = field(default_factory=dict)
    host: dict[int, list[int]] = field(default_factory=dict)
    slots: list[list[int]] = field(default_factory=list)
    leaving: dict[int, list[int]] = field(default_factory=dict)
    """GPU ids of groups whose copy to the host is under way: free when it ends."""
    arriving: dict[int, list[int]] = field(default_factory=dict)
    """GPU ids of groups whose copy from the host is under way."""
    version: int = 0
    """Goes up whenever `gpu` changes."""


class Placement:
    """Block ids of all sequences of one instance.

    Args:
        gpu, host: pools of ids, of the blocks that the scheduler counts.
        num_groups: groups of layers; 1 for vLLM.
        block_tokens: tokens a block holds.
    """

    def __init__(self, gpu: Blocks, host: Blocks, *, num_groups: int, block_tokens: int) -> None:
        self.gpu, self.host = gpu, host
        self.num_groups, self.block_tokens = num_groups, block_tokens
        self.held: dict[Sequence, Held] = {}
        self._dropped: list[Sequence] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of each group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    # -- following the scheduler ---------------------------------------------------------------------------------

    def follow(
        self, plan: IterationPlan, decodes: Seq[tuple[Sequence, int]], settle: Callable[[Sequence], None]
    ) -> list[Move]:
        """Bring the ids in line with what the scheduler has decided; returns the copies to make before computing.

        Args:
            plan: what will be executed next.
            decodes: the sequences that take a token, with the context length fed (this token included).
            settle: waits for the copies of a sequence whose blocks are about to be given to others.
        """
        moves: list[Move] = []
        moving = {transfer.seq for transfer in plan.background}
        # Who computes again from the first token holds nothing, even where it was preempted and admitted in one step.
        anew = {chunk.seq for chunk in plan.chunks if not chunk.num_cached}
        for seq in list(self.held):
            if seq in anew or seq.status in (Status.FINISHED, Status.IGNORED) or _is_reset(seq):
                settle(seq)
                self._drop(seq)
        for seq in self.held:
            # A parked one that no copy takes out: offloaded before the step because the forecast came too late.
            late = seq.status is Status.PARKED and seq not in moving and not seq.layers_on_gpu
            if late or seq.status is Status.SWAPPED:
                moves += self._to_host(seq)
        for seq, _, num_cached, _ in plan.chunks:
            if num_cached:
                moves += self._return(seq)
            else:
                self.held[seq] = self._place_prompt(seq)
        for seq, num_tokens in decodes:
            moves += self._return(seq)
            self._grow(seq, self.blocks_for(num_tokens))
        return moves

    def take_dropped(self) -> list[Sequence]:
        """Sequences that have given all their blocks back since this was last asked."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _drop(self, seq: Sequence) -> None:
        held = self.held.pop(seq)
        self._dropped.append(seq)
        for ids in (*held.gpu.values(), *held.slots, *held.leaving.values(), *held.arriving.values()):
            self.gpu.free(ids)
        for ids in held.host.values():
            self.host.free(ids)

    def _place_prompt(self, seq: Sequence) -> Held:
        """Blocks for the whole prompt: retained groups on the GPU, the others on the host with a send buffer."""
        held, blocks = Held(), seq.num_blocks
        if self.num_groups == 1:
            held.gpu[0] = self.gpu.allocate(blocks)
            return held
        kept = retained_layers(self.num_groups, seq.layers_on_gpu) if seq.layers_on_gpu else ()
        for group in range(self.num_groups):
            if group in kept:
                held.gpu[group] = self.gpu.allocate(blocks)
            else:
                held.host[group] = self.host.allocate(blocks)
        slots = min(SEND_BUFFER_LAYERS, len(held.host))
        held.slots = [self.gpu.allocate(blocks) for _ in range(slots)]
        return held

    def _to_host(self, seq: Sequence) -> list[Move]:
        """Everything on the GPU to the host, before the computation."""
        held = self.held[seq]
        moves = []
        for group, ids in sorted(held.gpu.items()):
            target = self.host.allocate(len(ids))
            held.host[group] = target
            moves.append(Move(seq, Direction.D2H, tuple(ids), tuple(target)))
            self.gpu.free(ids)
        held.gpu.clear()
        held.version += 1
        return moves

    def _return(self, seq: Sequence) -> list[Move]:
        """A swapped sequence that computes again has its blocks back on the GPU, before the computation."""
        held = self.held[seq]
        if self.num_groups > 1 or not held.host:
            return []
        ids = held.host.pop(0)
        held.gpu[0] = self.gpu.allocate(len(ids))
        held.version += 1
        move = Move(seq, Direction.H2D, tuple(ids), tuple(held.gpu[0]))
        self.host.free(ids)
        return [move]

    def _grow(self, seq: Sequence, blocks: int) -> None:
        held = self.held[seq]
        for ids in held.gpu.values():
            if len(ids) < blocks:
                ids += self.gpu.allocate(blocks - len(ids))
                held.version += 1
        for ids in held.host.values():
            if len(ids) < blocks:
                ids += self.host.allocate(blocks - len(ids))

    # -- copies beside the computation ---------------------------------------------------------------------------

    def begin(self, transfer: Transfer) -> Move:
        """Choose the groups of a background copy and reserve where they go; `end` follows when the copy has ended."""
        held = self.held[transfer.seq]
        held.version += 1
        source: list[int] = []
        target: list[int] = []
        if transfer.direction is Direction.D2H:
            groups = sorted(held.gpu)
            staying = len(groups) - transfer.layers
            kept = {groups[i] for i in retained_layers(len(groups), staying)} if staying else set()
            for group in groups:
                if group not in kept:
                    ids = held.leaving[group] = held.gpu.pop(group)
                    held.host[group] = self.host.allocate(len(ids))
                    source += ids
                    target += held.host[group]
        else:
            for group, ids in sorted(held.host.items()):
                held.arriving[group] = self.gpu.allocate(len(ids))
                source += ids
                target += held.arriving[group]
            if len(held.host) != transfer.layers:
                raise InvariantError(
                    f"{transfer.seq}: {len(held.host)} groups on the host, {transfer.layers} to return"
                )
        return Move(transfer.seq, transfer.direction, tuple(source), tuple(target))

    def end(self, transfer: Transfer) -> None:
        """A background copy has ended: what it left behind is free."""
        held = self.held.get(transfer.seq)
        if held is None:
            return
        held.version += 1
        if transfer.direction is Direction.H2D:
            for group, ids in held.arriving.items():
                held.gpu[group] = ids
                self.host.free(held.host.pop(group))
            held.arriving.clear()
            return
        for ids in held.leaving.values():
            self.gpu.free(ids)
        held.leaving.clear()

    def end_prefill(self, seq: Sequence) -> None:
        """The last copy behind a prefill has ended: its send buffer is free."""
        held = self.held.get(seq)
        if held is not None:
            for ids in held.slots:
                self.gpu.free(ids)
            held.slots = []

    def check(self) -> None:
        """InvariantError if two sequences hold the same block."""
        for tier in ("gpu", "host"):
            seen: set[int] = set()
            for held in self.held.values():
                lists = list(getattr(held, tier).values())
                if tier == "gpu":
                    lists += [*held.slots, *held.leaving.values(), *held.arriving.values()]
                for ids in lists:
                    if seen.intersection(ids) or len(set(ids)) != len(ids):
                        raise InvariantError(f"{tier} blocks {sorted(seen.intersection(ids)) or ids} are held twice")
                    seen.update(ids)


def _is_reset(seq: Sequence) -> bool:
    """Back in the queue to be computed from its first token."""
    return seq.status is Status.WAITING and seq.num_computed == 0
