"""`HandOver`: prefilled sequences leave for another engine, which pulls their KV when it has room (DistServe's way).

The blocks stay taken here until the copy has ended, so that a slow decode pool holds prefills up.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move, Tier
from sim.engine.sequence import SLOTS, Sequence, Status
from sim.kv.memory import ReturnsKV
from sim.parts.base import Stage
from sim.parts.catalogue import class_at
from sim.parts.stage.direct import Direct
from sim.parts.stage.hand_over_options import HandOverOptions, MixedPoolOptions

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class HandOver(Stage):
    """KV of sequences in `leaving` is still to be pulled; no other engine knows yet of those in `prefilled`.

    Args:
        layer_wise: whether a layer's KV may leave while later ones are computed.
    """

    name: ClassVar[str] = "hand-over"
    options: ClassVar[type | None] = HandOverOptions
    hands_over: ClassVar[bool] = True

    @classmethod
    def build(cls, b: "Builder") -> Stage:
        role, options = b.deployment.role, b.options(HandOverOptions)
        if role == "both":
            # It hands over to itself.
            return Direct()
        if b.options(MixedPoolOptions).mixed_pool:
            mixed = class_at("sim.parts.stage.mixed:Mixed")
            return mixed(options.waiting_share, options.layer_wise, options.blocking_pull)
        if role == "prefill":
            return cls(options.layer_wise)
        return class_at("sim.parts.stage.pull:Pull")(options.waiting_share, options.blocking_pull)

    def __init__(self, layer_wise: bool = False) -> None:
        self.layer_wise = layer_wise
        self.leaving: dict[Sequence, None] = {}
        self.prefilled: list[Sequence] = []

    @property
    def num_parked(self) -> int:
        return len(self.leaving)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in self.leaving)

    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        self.leaving[seq] = None
        self.prefilled.append(seq)
        self.scheduler.park(seq)

    def continued(self, seq: Sequence) -> Sequence:
        """`seq` as the engine knows it that goes on with it."""
        return continued(seq)

    def migrated(self, move: Move) -> None:
        seq, policy = move.seq, self.scheduler.counters.policy
        if move.target is Tier.GPU:
            assert isinstance(self.memory.backing, ReturnsKV)
            self.memory.backing.insert(seq)
            return
        del self.leaving[seq]
        policy["handed_over"] += 1
        policy["handed_over_blocks"] += move.num_blocks
        self.scheduler.release(seq)
        seq.status = Status.HANDED_OVER


def continued(seq: Sequence) -> Sequence:
    """`seq` as the engine knows it that goes on with it: the same progress, no blocks yet."""
    # Each engine has its own: they hold blocks at the same time while KV is on its way.
    copy = Sequence(seq.request)
    for name in SLOTS:
        setattr(copy, name, getattr(seq, name))
    copy.num_blocks = 0
    return copy
