"""`conductor_of`: Mooncake's conductor over the engines of a run, and the store that their memories report to."""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from sim.clock.hand_overs import IN, OUT
from sim.clock.member import Member
from sim.cost.lanes import Lane
from sim.cost.model import CostModel
from sim.engine.changes import Direction
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan, Origin
from sim.engine.sequence import Sequence as Seq
from sim.frozen import frozen
from sim.systems.mooncake.preset import ConductorOptions
from sim.systems.mooncake.stored import StoredMemory
from sim.topology.conductor import Conductor, Estimates, Rules
from sim.topology.store import GlobalStore
from traces.request import Request

if TYPE_CHECKING:
    from sim.topology.routers import EngineView


@frozen
class Prices:
    """What the conductor estimates with: the constants that the clock runs on.

    Attributes:
        prefill, decode: of either kind of engine.
        limits: of those that prefill.
        decode_tokens: KV that one that decodes has room for.
        layers: of the model.
        s_per_token: of KV over a link, s.
    """

    prefill: CostModel
    decode: CostModel
    limits: Limits
    decode_tokens: int
    layers: int
    s_per_token: float
    members: Sequence[Member]

    def prefill_s(self, request: Request, loaded: int) -> float:
        """A prompt alone, the first `loaded` tokens of it brought in from the host meanwhile."""
        seq, plan, cost = Seq(request), IterationPlan(), self.prefill
        seq.num_computed = loaded
        plan.add_chunk(seq, request.prompt_tokens - loaded, Origin.ADMITTED)
        blocks = loaded // self.limits.block_size
        copies = cost.num_copies(blocks, self.layers)
        return max(cost.iteration_s(plan), cost.copy_s(blocks * self.limits.block_bytes, copies, Direction.H2D))

    def decode_s(self, num_seqs: int, context_tokens: int) -> float:
        """An iteration; infinite where that does not fit."""
        if context_tokens > self.decode_tokens:
            return inf
        return self.decode.decode_run(num_seqs, context_tokens)[0]

    def links(self, source: int, target: int) -> tuple[Lane, Lane]:
        """The lanes that a copy between two nodes takes."""
        return self.members[source].lanes.link(OUT), self.members[target].lanes.link(IN)

    def transfer_s(self, source: int, target: int, tokens: int, now_s: float) -> float:
        """How long a copy would take, waiting included."""
        out, into = self.links(source, target)
        return max(now_s, out.free_s, into.free_s) - now_s + tokens * self.s_per_token

    def transfer(self, source: int, target: int, tokens: int, now_s: float) -> float:
        """Copy; returns the end, s."""
        out, into = self.links(source, target)
        start_s, seconds = max(now_s, out.free_s, into.free_s), tokens * self.s_per_token
        into.reserve(start_s, seconds, "prefix")
        return out.reserve(start_s, seconds, "prefix")


def conductor_of(
    options: ConductorOptions, prices: Prices, prefills: Sequence[Member], decoders: "Sequence[EngineView]"
) -> Conductor:
    """The conductor, with a store over the nodes of the engines that prefill."""
    limits = prices.limits
    store = GlobalStore(len(prefills), limits.num_cpu_blocks * limits.block_size)
    rules = Rules(
        threshold=options.balancing_threshold,
        rejection=options.rejection,
        ttft_slo_s=options.ttft_slo_ms / 1e3,
        tbt_slo_s=options.tbt_slo_ms / 1e3,
        decode_s=options.predicted_decode_s,
        block_size=limits.block_size,
    )
    for node, member in enumerate(prefills):
        memory_of(member).on_computed = partial(_keep, store, node)
    estimates = Estimates(prefill_s=prices.prefill_s, decode_s=prices.decode_s, transfer_s=prices.transfer_s)

    def grant(place: int, request: Request, tokens: int) -> None:
        memory_of(prefills[place]).granted[request.request_id] = tokens

    return Conductor(store, rules, estimates, decoders, transfer=prices.transfer, grant=grant)


def memory_of(member: Member) -> StoredMemory:
    """The memory of an engine behind a conductor."""
    memory = member.engine.scheduler.memory
    assert isinstance(memory, StoredMemory)
    return memory


def _keep(store: GlobalStore, node: int, request: Request) -> None:
    if request.hash_ids:
        store.add(node, store.path(request.hash_ids), request.hash_block_tokens)
