"""Where requests are sent, by engines whose loads are given, as it is pinned in `golden/routes.txt`.

    python tests/sim/pinned_routes.py      # writes golden/routes.txt anew

Loads tie, thresholds are met exactly, prefixes end within blocks, stores hold hardly anything.
"""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from goldens import GOLDEN, digest, rounded, write

from kvtwin.testing import linear_machine
from sim.clock.conducted import Prices
from sim.cost.forms import build_cost
from sim.cost.lanes import Lane
from sim.cost.profile import read_profile
from sim.engine.limits import Limits
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model
from sim.topology import ROUTERS
from sim.topology.conductor import Conductor, Estimates, Rules
from sim.topology.mixed_pool import MixedPools
from sim.topology.pipelines import to_pipelines
from sim.topology.prefix_tree import PrefixTree
from sim.topology.routers import FewestWaitingTokens, PrefixAffinity, PromptTrees
from sim.topology.store import GlobalStore
from traces.request import Request

ROUTES = GOLDEN / "routes.txt"
RUNS, REQUESTS = 60, 40
"""Of each kind, and of each run."""
TOLD = 4
"""Of those, whose decisions stand in full."""


def request_of(rng: random.Random, place: int, now_s: float, block: int = 16) -> Request:
    """Of a few conversations that begin alike; its prompt may end within its last block."""
    who, length = rng.randrange(4), rng.randint(0, 6)
    ids = tuple(10 * who + i if i > 1 else i + 1 for i in range(length))
    prompt = max(1, length * block - rng.choice((0, 0, 1, 7)))
    after = tuple(range(500 + place, 502 + place)) if rng.random() < 0.5 else ()
    named = block if ids else 0
    return Request(place, now_s, prompt, rng.randint(1, 9), rng.choice(("", f"talk {who}")), ids, named, after)


def views_of(rng: random.Random, count: int, now_s: float, scale: int) -> list[Any]:
    """Engines as they stand; many alike."""
    return [
        SimpleNamespace(
            num_in_flight=rng.choice((0, 0, 1, 2, 3)) * scale, tokens_in_flight=rng.choice((0, 50, 100, 150)),
            num_waiting=rng.choice((0, 0, 1, 2)), running_until_s=rng.choice((0.0, now_s + 0.25, now_s + 1.0)),
            waiting_tokens=rng.choice((0, 0, 40, 60, 100)),
        )
        for _ in range(count)
    ]  # fmt: skip


def told(kind: str, of: Callable[[random.Random], Iterator[object]]) -> Iterator[str]:
    """Runs of a kind."""
    for place in range(RUNS):
        found = [repr(rounded(it)) for it in of(random.Random(f"{kind} {place}"))]
        yield f"{kind} {place}: {digest(found)} {' '.join(found) if place < TOLD else ''}"


def routers() -> Iterator[str]:
    """Those that look at loads and prefixes, before engines and pipelines."""
    kinds: dict[str, Callable[[int], Any]] = {
        **ROUTERS, "waiting tokens": lambda seed: FewestWaitingTokens(), "prompt trees": lambda seed: PromptTrees(),
        "affinity, balanced": lambda seed: PrefixAffinity(0.25, 2, 1.5),
        "affinity, less": lambda seed: PrefixAffinity(0.5, 20, 3.0),
    }  # fmt: skip
    for name, kind in kinds.items():

        def decisions(rng: random.Random, kind: Callable[[int], Any] = kind) -> Iterator[object]:
            count, stages, scale = rng.choice((1, 2, 3, 5)), rng.choice((1, 1, 2)), rng.choice((1, 10, 40))
            router = to_pipelines(kind(rng.randrange(9)), stages)
            for place in range(REQUESTS):
                request = request_of(rng, place, float(place))
                if not request.hash_ids:
                    request = request._replace(hash_ids=(900 + place,), hash_block_tokens=16)
                yield router.route(request, views_of(rng, count * stages, float(place), scale))

        yield from told(name, decisions)


def mixed(rng: random.Random) -> Iterator[object]:
    """Machines of two pools that turn mixed."""
    count, moved = rng.choice((2, 3, 5)), list[int]()
    capacity = [rng.choice((150, 250, 400)) for _ in range(count)]
    pools = MixedPools(rng.randint(1, count - 1), capacity, rng.choice((60, 100, 10**6)), moved.append)
    known: list[Request] = []
    for place in range(REQUESTS):
        request = request_of(rng, place, float(place))
        known.append(request)
        chosen = pools.route(request, views_of(rng, count, float(place), 1))
        yield chosen, pools.targets[place], pools.mixed[:], pools._coming[:], moved[:]
        for other in rng.sample(known, min(len(known), rng.choice((0, 1, 2)))):
            (pools.arrived if rng.random() < 0.5 else pools.ended)(other)
            yield sorted(pools.targets), pools._coming[:]


def conductors(rng: random.Random) -> Iterator[object]:
    """Estimates in quarters of a second, so that some tie with one another and with SLOs."""
    count, block, moves, granted = rng.choice((1, 2, 3)), rng.choice((1, 16, 32)), list[object](), list[object]()
    rules = Rules(
        threshold=rng.choice((1.0, 1.5, 2.0)), rejection=rng.choice(("none", "early", "predicted")), block_size=block,
        ttft_slo_s=rng.choice((0.5, 1.0, 9.0)), tbt_slo_s=rng.choice((0.25, 0.5)), decode_s=rng.choice((1.0, 4.0)),
    )  # fmt: skip
    link_s = rng.choice((0.0, 1 / 64, 1 / 8))
    estimates = Estimates(
        prefill_s=lambda request, loaded: (request.prompt_tokens - loaded) / 64.0,
        decode_s=lambda num, tokens: 0.125 * num if tokens < 400 else float("inf"),
        transfer_s=lambda source, target, tokens, now_s: tokens * link_s + 0.25 * (source > target),
    )

    def transfer(source: int, target: int, tokens: int, now_s: float) -> float:
        moves.append((source, target, tokens, now_s))
        return now_s + tokens * link_s

    store = GlobalStore(count, rng.choice((32, 80, 10_000)))
    decoders = views_of(rng, rng.choice((1, 2)), 0.0, 1)
    conductor = Conductor(
        store, rules, estimates, decoders, transfer=transfer, grant=lambda *given: granted.append((given[0], given[2]))
    )
    now_s = 0.0
    for place in range(REQUESTS):
        now_s += rng.choice((0.0, 0.25, 2.0))
        request = request_of(rng, place, now_s)
        for decoder, view in zip(decoders, views_of(rng, len(decoders), now_s, 1), strict=True):
            vars(decoder).update(vars(view))
        chosen = conductor.route(request, views_of(rng, count, now_s, 1))
        yield chosen, conductor.ready_s, conductor.reason[:22], moves[-1:], granted[-1:], store.num_evicted
        if chosen >= 0 and request.hash_ids and rng.random() < 0.6:
            store.add(chosen, store.path(request.hash_ids), 16)


def stores(rng: random.Random) -> Iterator[object]:
    """Prefixes that come, at once or later, and give way."""
    store, now_s = GlobalStore(2, rng.choice((0, 15, 16, 48, 64))), 0.0
    tree = PrefixTree()
    for place in range(REQUESTS):
        now_s += rng.choice((0.0, 0.5))
        request = request_of(rng, place, now_s)
        path = store.path(request.hash_ids)
        yield path, store.lengths(path, now_s), store.num_evicted, tree.longest(request.hash_ids)
        if rng.random() < 0.5:
            store.add(rng.randrange(2), path, 16)
        elif path:
            store.add_at(now_s + rng.choice((0.0, 0.5, 1.0)), rng.randrange(2), path, 16)
        if rng.random() < 0.7:
            tree.add(request.hash_ids, rng.randrange(3))


def prices(rng: random.Random) -> Iterator[object]:
    """What the conductor estimates with, of small machines and a card."""
    size = rng.choice((1, 16))
    limits = Limits(100, rng.choice((0, 100)), size, 65536.0 * size, 2048, 8, 2048)
    card = build_cost(
        load_model("llama-2-7b"), load_hardware("l20"), read_profile(GOLDEN / "l20-profile.json"), 1, 2.0**20
    )
    line = linear_machine(65536.0 * size, prefill=(0.01, 2e-4, 3e-7), swap_s_per_block=rng.choice((1e-5, 0.05))).cost
    names = "link out", "link in"
    lanes = [SimpleNamespace(link={name: Lane(name) for name in names}.__getitem__) for _ in range(2)]
    prefill, decode = rng.choice(((card, line), (line, card), (line, line)))
    members: list[Any] = [SimpleNamespace(lanes=lane) for lane in lanes]
    own = Prices(prefill, decode, limits, 1600, layers=rng.choice((1, 32)), s_per_token=1e-3, members=members)
    now_s = 0.0
    for place in range(REQUESTS):
        now_s += rng.choice((0.0, 0.05, 1.0))
        request = request_of(rng, place, now_s)
        yield own.prefill_s(request, rng.randint(0, request.prompt_tokens - 1) // size * size)
        yield own.decode_s(rng.choice((1, 4)), rng.choice((10, 1599, 1600, 1601)))
        source = rng.randrange(2)
        yield own.transfer_s(source, 1 - source, 50, now_s)
        if rng.random() < 0.5:
            yield own.transfer(source, 1 - source, rng.choice((1, 100)), now_s)
    yield [[lane.link(name).busy_s, lane.link(name).free_s] for lane in lanes for name in names]


PINNED = {
    "routers": routers, "mixed pools": lambda: told("mixed", mixed),
    "conductors": lambda: told("conductor", conductors),
    "stores": lambda: told("store", stores),
    "prices": lambda: told("prices", prices),
}  # fmt: skip


def main() -> None:
    write(ROUTES, PINNED)


if __name__ == "__main__":
    main()
