"""`HandOvers`: sequences that one engine prefills and another decodes, and the links that their KV travels over.

Every engine has one link lane in each direction that it uses. A copy starts when the lanes of both engines are free and
takes bytes / bandwidth of both; until it has ended the blocks are taken on both sides. Where a prompt's layers are sent
one by one (`Stage.layer_wise`), the copy starts with the first layer's end, if the other engine had room at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from sim.clock.member import Member
from sim.engine.changes import Move, Tier
from sim.engine.sequence import Sequence as Seq
from sim.engine.sequence import Status
from sim.kv.memory import ReturnsKV
from sim.parts.stage.hand_over import continued
from sim.parts.stage.mixed import Mixed
from sim.topology.mixed_pool import MixedPools
from sim.topology.routers import Router

OUT, IN = "link out", "link in"
"""Names of an engine's lanes to others."""


class HandOvers:
    """Which engine goes on with a prefilled sequence, and when its KV has come.

    Args:
        members: all engines of the cluster.
        decoders: places of those that decode.
        router: chooses which of them is told of a sequence.
        bytes_per_s: of every link, in each direction.
        block_bytes: of a whole block, over all GPUs of an engine.
        layers: of the model.
        pools: say which engine decodes what, where engines of both pools may.
        next_places: of the virtual engines of pipelines that take turns: which is next after a time, s.
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
        pools: MixedPools | None = None,
    ) -> None:
        self.layers, self.next_places = layers, next_places or {}
        self.members, self.decoders, self.router = members, decoders, router
        self.s_per_block = block_bytes / bytes_per_s
        self.prefilled_by: dict[Seq, int] = {}
        """Places where sequences that decode or are to decode were prefilled; removed when a sequence ends."""
        self.on_wake: Callable[[int], None] = lambda place: None
        """Hears of engines whose boundary came forward."""
        self._views = [members[place] for place in decoders]
        # Each sequence that is offered: what it is to the engine that prefilled it, that engine's place, and how often
        # the engine that is to pull it had decided by then.
        self._left: dict[Seq, tuple[Seq, int, int]] = {}
        # Where those were prefilled whose answers are sent back.
        self._sources: dict[Seq, int] = {}
        self.pools = pools
        for place in decoders:
            members[place].carry = self.carry
            if pools is not None:
                members[place].take_back = partial(self.take_back, place)

    def offer_from(self, place: int) -> Iterator[int]:
        """Tell decode engines of what the engine at `place` has prefilled; places of those whose boundary came
        forward."""
        member = self.members[place]
        stage = member.engine.scheduler.stage
        if not stage.hands_over or not stage.prefilled:
            return
        for seq in stage.prefilled:
            goes_on = stage.continued(seq)
            chosen = self._chosen(seq)
            self._left[goes_on] = seq, place, self.members[chosen].num_decisions
            self.prefilled_by[goes_on] = place
            backing = self.members[chosen].engine.scheduler.memory.backing
            if isinstance(backing, ReturnsKV) and backing.returns_kv:
                self._sources[goes_on] = place
            member.let_go(seq.request)
            self.members[chosen].take(seq.request)
            if self.members[chosen].tell(seq.last_token_s, goes_on):
                yield chosen
        stage.prefilled.clear()

    def _chosen(self, seq: Seq) -> int:
        if self.pools is not None:
            self.pools.arrived(seq.request)
            return self.pools.targets[seq.request.request_id]
        chosen = self.decoders[self.router.route(seq.request, self._views)]
        return self.next_places[chosen](seq.last_token_s) if chosen in self.next_places else chosen

    def take_back(self, place: int, member: Member, now_s: float) -> bool:
        """Let `member`, at `place`, decode itself the oldest sequence that it prefilled for others and none pulled.

        Only if it can do nothing else, and prompts or KV have no room there: two engines may be full of what each is to
        have of the other.
        """
        scheduler = member.engine.scheduler
        stage = scheduler.stage
        if self.pools is None or not isinstance(stage, Mixed) or not (scheduler.order.waiting or stage.offered):
            return False
        goes_on = next((seq for seq, (_, source, _) in self._left.items() if source == place), None)
        if goes_on is None:
            return False
        seq = self._left.pop(goes_on)[0]
        target = self.pools.targets[seq.request.request_id]
        other = self.members[target].engine.scheduler.stage
        assert isinstance(other, Mixed)
        if goes_on in other.offered:
            other.offered.remove(goes_on)
        # It may be on its way to being offered, and what was behind it may have room.
        goes_on.status = Status.HANDED_OVER
        del self.prefilled_by[goes_on]
        self.pools.targets[seq.request.request_id] = place
        self.members[target].let_go(seq.request)
        member.take(seq.request)
        stage.take_back(seq)
        if self.members[target].tell(now_s, goes_on):
            self.on_wake(target)
        return True

    def carry(self, member: Member, move: Move, at_s: float) -> float:
        """Start a copy that `member` pulls, or sends back; returns its end, s, of which the other engine is told."""
        if move.target is Tier.PEER:
            return self._send_back(member, move, at_s)
        seq, place, decisions = self._left.pop(move.seq)
        source = self.members[place]
        if source.engine.scheduler.stage.layer_wise and member.num_decisions == decisions + 1:
            end_s = max(at_s, self._stream(source, member, seq, move.num_blocks))
        else:
            end_s = self._book(source, member, seq, at_s, move.num_blocks)
        if source.tell(end_s, replace(move, seq=seq, source=Tier.GPU, target=Tier.PEER)):
            self.on_wake(place)
        return end_s

    def _send_back(self, member: Member, move: Move, at_s: float) -> float:
        """Send what `member` has generated to the engine that prefilled it."""
        place = self._sources.pop(move.seq)
        target, came = self.members[place], continued(move.seq)
        end_s = self._book(member, target, move.seq, at_s, move.num_blocks)
        if target.tell(end_s, replace(move, seq=came, source=Tier.PEER, target=Tier.GPU)):
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
