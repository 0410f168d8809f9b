"""`HandOvers`: sequences that one engine prefills and another decodes, and the links that their KV travels over.

Every engine has one link lane in each direction that it uses. A copy starts when the lanes of both engines are free and
takes bytes / bandwidth of both; until it has ended the blocks are taken on both sides.
"""

from collections.abc import Callable, Iterator, Sequence

from sim.clock.member import Member
from sim.engine.plan import Move, Tier
from sim.engine.sequence import Sequence as Seq
from sim.parts.stage.hand_over import continued
from sim.topology.routers import Router

OUT, IN = "link out", "link in"
"""Names of an engine's lanes to others."""


class HandOvers:
    """Who goes on with a prefilled sequence, and when its KV has come.

    Args:
        members: all engines of the cluster.
        decoders: places of those that decode.
        router: who of them is told of a sequence.
        bytes_per_s: of every link, in each direction.
        block_bytes: of a whole block, over all GPUs of an engine.
    """

    def __init__(
        self, members: Sequence[Member], decoders: Sequence[int], router: Router, bytes_per_s: float, block_bytes: float
    ) -> None:
        self.members, self.decoders, self.router = members, decoders, router
        self.s_per_block = block_bytes / bytes_per_s
        self.prefilled_by: dict[Seq, int] = {}
        """Where those came from that decode or are to decode."""
        self.on_wake: Callable[[int], None] = lambda place: None
        """Hears of engines whose boundary came forward."""
        self._views = [members[place] for place in decoders]
        # Each sequence that is offered, and what it is to the engine that prefilled it.
        self._left: dict[Seq, Seq] = {}
        for place in decoders:
            members[place].carry = self.carry

    def offer_from(self, place: int) -> Iterator[int]:
        """Tell decode engines of what the engine at `place` has prefilled; places of those whose boundary came
        forward."""
        member = self.members[place]
        stage = member.engine.scheduler.stage
        if not stage.hands_over or not stage.prefilled:
            return
        for seq in stage.prefilled:
            goes_on = continued(seq)
            chosen = self.decoders[self.router.route(seq.request, self._views)]
            self._left[goes_on], self.prefilled_by[goes_on] = seq, place
            member.num_in_flight -= 1
            self.members[chosen].num_in_flight += 1
            if self.members[chosen].tell(seq.last_token_s, goes_on):
                yield chosen
        stage.prefilled.clear()

    def carry(self, member: Member, move: Move, at_s: float) -> float:
        """Start a copy that `member` pulls; returns its end, s, of which the other engine is told."""
        seq = self._left.pop(move.seq)
        place = self.prefilled_by[move.seq]
        source = self.members[place]
        out, into = source.lanes.link(OUT), member.lanes.link(IN)
        seconds = move.num_blocks * self.s_per_block
        label = f"KV of request {seq.request.request_id}"
        start_s = max(at_s, out.free_s, into.free_s)
        end_s = out.reserve(start_s, seconds, label)
        into.reserve(start_s, seconds, label)
        left = Move(seq, move.groups, 0, move.end_token, Tier.GPU, Tier.PEER, move.num_blocks, move.num_freed, True)
        if source.tell(end_s, left):
            self.on_wake(place)
        return end_s
