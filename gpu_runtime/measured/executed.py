"""`Executed`: what one iteration has really copied, and whether that is what its plan said."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_runtime.kv.replay.held import BlockCopy
from sim.engine.changes import Direction, Move, Projected, Rebuilt, Restore, Uncache
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


class Moved(NamedTuple):
    """`num_blocks` blocks of a sequence, of all these layer groups together, went from tier to tier."""

    seq: Sequence
    groups: tuple[int, ...]
    direction: Direction
    num_blocks: int


@dataclass
class Executed:
    """Counts of the blocks that were copied, not of those that should have been."""

    moves: list[Moved | Restore] = field(default_factory=list)
    """Before and beside the computation, in the order in which they were started; restores that compute whole."""
    behind: list[Moved] = field(default_factory=list)
    """Of prefills, while later layers were computed."""
    num_read: int = 0
    num_written: int = 0
    """Between the layers: what was cached into the send buffers and slots, and what decodes wrote out of them."""
    num_projected: int = 0
    """Tokens, in whole blocks, whose KV was made between the layers from inputs, rather than read."""
    num_rebuilt: int = 0
    """Tokens of single layers whose KV was computed again between the layers."""
    num_saved: int = 0
    """Inputs of single tokens and layers that went to the host beside their KV."""
    num_decodes: int = 0
    given_up: set[Sequence] = field(default_factory=set)
    """Sequences that could not be computed for lack of memory: what was copied for them is not known."""

    def add(self, copy: BlockCopy) -> None:
        """A copy before or beside the computation was started."""
        self.moves.append(Moved(copy.seq, copy.groups, copy.direction, len(copy.source)))

    def check(self, plan: IterationPlan) -> None:
        """InvariantError unless the plan said so, block by block."""
        planned = [move for move in moves_of(plan) if not isinstance(move, Restore) or move.seq not in self.given_up]
        _compare("copied before and beside the computation", self.moves, planned)
        behind = [_moved(move) for move in plan.behind if move.seq not in self.given_up]
        sent = [moved for moved in self.behind if moved.seq not in self.given_up]
        _compare("sent behind the prefills", sorted(sent, key=_key), sorted(behind, key=_key))
        _compare("sequences that decode", self.num_decodes, plan.num_decodes)
        if self.given_up:
            # The plan's sums are theirs as well.
            return
        _compare("blocks read between the layers", self.num_read, sum(streamed.num_read for streamed in plan.streamed))
        written = sum(streamed.num_written for streamed in plan.streamed)
        projected = [record for record in plan.streamed if isinstance(record, Projected)]
        inputs = sum(record.num_inputs for record in projected)
        _compare("blocks written between the layers", self.num_written, written - inputs)
        tokens = sum(record.num_groups * record.num_tokens for record in projected)
        _compare("tokens projected between the layers", self.num_projected, tokens)
        again = sum(
            n * len(record.recomputed)
            for record in plan.streamed
            if isinstance(record, Rebuilt)
            for _, n in record.tokens
        )
        _compare("tokens computed again between the layers", self.num_rebuilt, again)
        # A block that a decode writes has one new token.
        saved = sum(record.num_written - record.num_inputs for record in projected if record.num_inputs)
        if plan.behind_blocks > sum(move.num_blocks for move in plan.behind):
            saved += sum((move.end_token - move.first_token) * len(move.groups) for move in plan.behind)
        _compare("inputs that were saved", self.num_saved, saved)


def moves_of(plan: IterationPlan) -> list[Moved | Restore]:
    """What a plan says is copied before and beside the computation."""
    found: list[Moved | Restore] = []
    for change in plan.changes:
        match change:
            case Move():
                found.append(_moved(change))
            case Restore() if change.computes:
                found.append(change)
            case Uncache() if change.num_blocks:
                found.append(Moved(change.seq, change.groups, Direction.D2H, change.num_blocks))
            case Restore():
                found.append(Moved(change.seq, change.kv_groups, Direction.H2D, change.num_blocks))
            case _:
                pass
    return found + [_moved(move) for move in plan.beside]


def _moved(move: Move) -> Moved:
    return Moved(move.seq, move.groups, move.direction, move.num_blocks)


def _key(moved: Moved) -> tuple[int, tuple[int, ...]]:
    return id(moved.seq), moved.groups


def _compare(what: str, executed: object, planned: object) -> None:
    if executed != planned:
        raise InvariantError(f"{what}: {executed} executed, {planned} planned")
