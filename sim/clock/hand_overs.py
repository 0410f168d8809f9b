"""`HandOvers`: sequences that one engine prefills and another decodes, and the links that their KV travels over.

Every engine has one link lane in each direction that it uses. A copy starts when the lanes of both engines are free and
takes bytes / bandwidth of both; until it has ended the blocks are taken on both sides. Where a prompt's layers are sent
one by one (`Stage.layer_wise`), the copy starts with the first layer's end, if the other engine had room at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

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
        layers: of the model.
        next_places: of the virtual engines of pipelines that take turns: who is next after a time, s.
    """

    def __init__(
        self,
        members: Sequence[Member],
        decoders: Sequence[int],
        router: Router,
        *,
        bytes_per_s: float,
        block_bytes: float,
        layers: int,
        next_places: Mapping[int, Callable[[float], int]] | None = None,
    ) -> None:
        self.layers, self.next_places = layers, next_places or {}
        self.members, self.decoders, self.router = members, decoders, router
        self.s_per_block = block_bytes / bytes_per_s
        self.prefilled_by: dict[Seq, int] = {}
        """Where those came from that decode or are to decode; whoever hears of a sequence's end takes it out."""
        self.on_wake: Callable[[int], None] = lambda place: None
        """Hears of engines whose boundary came forward."""
        self._views = [members[place] for place in decoders]
        # Each sequence that is offered: what it is to the engine that prefilled it, that engine's place, and how often
        # the engine that is to pull it had decided by then.
        self._left: dict[Seq, tuple[Seq, int, int]] = {}
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
            if chosen in self.next_places:
                chosen = self.next_places[chosen](seq.last_token_s)
            self._left[goes_on] = seq, place, self.members[chosen].num_decisions
            self.prefilled_by[goes_on] = place
            member.let_go(seq.request)
            self.members[chosen].take(seq.request)
            if self.members[chosen].tell(seq.last_token_s, goes_on):
                yield chosen
        stage.prefilled.clear()

    def carry(self, member: Member, move: Move, at_s: float) -> float:
        """Start a copy that `member` pulls; returns its end, s, of which the other engine is told."""
        seq, place, decisions = self._left.pop(move.seq)
        source = self.members[place]
        if source.engine.scheduler.stage.layer_wise and member.num_decisions == decisions + 1:
            end_s = max(at_s, self._stream(source, member, seq, move.num_blocks))
        else:
            end_s = self._book(source, member, seq, at_s, move.num_blocks)
        left = Move(seq, move.groups, 0, move.end_token, Tier.GPU, Tier.PEER, move.num_blocks, move.num_freed, True)
        if source.tell(end_s, left):
            self.on_wake(place)
        return end_s

    def _book(self, source: Member, target: Member, seq: Seq, ready_s: float, blocks: int) -> float:
        """Occupy both engines' lanes as soon as both are free; returns the end, s."""
        out, into = source.lanes.link(OUT), target.lanes.link(IN)
        seconds, label = blocks * self.s_per_block, f"KV of request {seq.request.request_id}"
        start_s = max(ready_s, out.free_s, into.free_s)
        into.reserve(start_s, seconds, label)
        return out.reserve(start_s, seconds, label)

    def _stream(self, source: Member, target: Member, seq: Seq, blocks: int) -> float:
        """The layers followed one another while the prompt was computed, as there was room at the first look; returns
        the end, s: that of the last layer's copy, which had to wait for its computation."""
        computed_s = seq.last_token_s - seq.first_scheduled_s
        end_s = self._book(source, target, seq, seq.first_scheduled_s + computed_s / self.layers, blocks)
        last_s = seq.last_token_s + blocks * self.s_per_block / self.layers
        if last_s > end_s:
            source.lanes.link(OUT).free_s = target.lanes.link(IN).free_s = end_s = last_s
        return end_s
