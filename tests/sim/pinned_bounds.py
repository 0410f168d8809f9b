"""What no scheduler exceeds, part by part, of seeded crowds, as it is pinned in `golden/bounds.txt`.

    python tests/sim/pinned_bounds.py      # writes golden/bounds.txt anew

Least work and its prices to eight digits; what a solver found to five, as another version ends elsewhere on the way.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from goldens import GOLDEN, digest, rounded, write
from msgspec import structs

from kvtwin.testing import linear_machine, tiny_model
from sim.bounds.first_tokens import most_in_time
from sim.bounds.goodput import certified, deadlines, goodput_bound, least_within
from sim.bounds.step_price import _share_below, step_prices, tangents
from sim.bounds.work import least_work, priced
from sim.cost.engine_profile import load_engine_profile
from sim.cost.forms import LinearCost, build_cost
from sim.cost.model import CostModel
from sim.cost.profile import ROOFLINE_UNITS, Constant, Profile, read_profile
from sim.engine.limits import Limits, StateLimits, WindowLimits
from sim.results.metrics import Goodput
from sim.specs.hardware import load_hardware
from sim.specs.kv_format import KVLayers
from sim.specs.models import load_model
from traces.request import Request

BOUNDS = GOLDEN / "bounds.txt"
WORKS, TIMES, GOODPUTS, SHARES = 200, 200, 150, 100
MODELS = ("llama-2-7b", "gemma-2-9b", "mixtral-8x7b-v0.1", "deepseek-v2-lite", "qwen3.5-35b-a3b", "gpt-oss-20b")

GATED = {
    name: Constant(value, None, "", "tests")
    for name, value in {
        "gdn_decode_bytes_per_s": 5e11, "gdn_decode_launch_s": 2e-6, "gdn_prefill_tokens_per_s": 3e7,
        "gdn_prefill_heads": 8.0, "gdn_prefill_padding_tokens": 16.0, "gdn_conv_bytes_per_s": 4e11,
        "gdn_prefill_launch_s": 3e-6, "attention_tile_tokens": 100.0, "attention_slots": 12.0,
    }.items()
}  # fmt: skip
"""What those profiles have not."""
DRAWN = {"FLOP/s": 6e13, "B/s": 3e11, "token/s": 2e7, "s": 4e-6, "s/sequence": 2e-6, "token": 60.0, "1": 2.5}
"""Of each unit, about what a constant of a profile is that has all of them."""


def full(profile: Profile) -> Profile:
    """A profile with every constant that it had not, each another."""
    more = {name: Constant(DRAWN[unit] * (1.0 + 0.01 * place), None, "", "tests")
            for place, (name, unit) in enumerate(ROOFLINE_UNITS.items()) if name not in profile.constants}  # fmt: skip
    return structs.replace(profile, constants=profile.constants | more)


def costs() -> Iterator[tuple[str, CostModel]]:
    """Models of all kinds of layers on two profiles that do not change, with engines' own time and without."""
    for gpu in ("l20", "t4"):
        hardware, profile = load_hardware(gpu), read_profile(GOLDEN / f"{gpu}-profile.json")
        profile = structs.replace(profile, constants=profile.constants | (GATED if gpu == "t4" else {}))
        for name in MODELS if gpu == "t4" else MODELS[:4]:
            for engine in (None, "vllm-0.5", "vllm-v1-async"):
                own = engine and load_engine_profile(engine)
                yield f"{name} {gpu} {engine}", build_cost(load_model(name), hardware, profile, 1, 2.0**21, engine=own)
            more = build_cost(load_model(name), hardware, full(profile), 1 if gpu == "l20" else 2, 2.0**21)
            yield f"{name} {gpu} in full", more
        yield f"paper {gpu}", build_cost(load_model(MODELS[0]), hardware, profile, 1, 2.0**21, "paper")
    layers = KVLayers(num_layers=3, num_stored=3), KVLayers(num_layers=2, num_stored=2, window=100)
    windowed = structs.replace(tiny_model(5), kv_layers=layers)
    yield "linear with windows", LinearCost((0.01, 2e-4, 0.0), (0.02, 1e-4, 1e-6), 3e-4, 2.0**21, model=windowed)
    yield "linear", linear_machine(2.0**21).cost
    yield "linear with squares", linear_machine(2.0**21, prefill=(0.01, 2e-4, 3e-7), decode=(0.02, 1e-4, 1e-6)).cost


def crowd(rng: random.Random, size: int = 12) -> list[Request]:
    """Prompts that begin alike and others, of one token and of more than there is room for."""
    found = []
    for place in range(size):
        prompt, output = rng.choice((1, 15, 16, 17, 100, 333, 1024, 1500)), rng.choice((1, 2, 16, 40, 600))
        ids = tuple([1, 2, rng.choice((3, 4)), 100 + place][: rng.randint(1, 4)]) if rng.random() < 0.5 else ()
        after = (ids[-1], 9) if ids and rng.random() < 0.3 else ()
        arrival_s = rng.choice((0.0, 0.5, 0.5, 1.25, 9.0))
        found.append(Request(place, arrival_s, prompt, output, "", ids, 16 if ids else 0, after))
    return sorted(found, key=lambda request: request.arrival_s)


def limits_of(rng: random.Random, chunked: bool) -> Limits:
    window = rng.choice((None, None, WindowLimits(rng.choice((1, 100, 4000)))))
    states = StateLimits(1, 3, False) if window is None and rng.random() < 0.2 else None
    return Limits(
        rng.choice((3, 64, 64, 2000)), 10, rng.choice((1, 16)), 2.0**21, rng.choice((300, 1024, 4096)),
        rng.choice((1, 7, 256)), 4096, enable_chunked_prefill=chunked, window=window, states=states,
    )  # fmt: skip


def prices() -> Iterator[str]:
    """Of iterations of every cost model."""
    for label, cost in costs():
        for size, blocks in ((16, 900), (1, 3)):
            found = [rounded(price) for price in step_prices(cost, size, blocks)]
            yield f"{label}, {blocks} blocks of {size}: {len(found)} {digest(found)} {found[:1]}"
    for exponent in (1.0, 1.3, 2.0, 8.0, float("inf")):
        yield f"tangents at {exponent}: {[rounded(tangents(exponent, count)) for count in (2, 3, 5)]}"
    for place in range(SHARES):
        rng = random.Random(f"share {place}")
        points = [(float(size), rng.choice((0.5, 0.9, 1.0, 1.4))) for size in (16, 64, 512)[: rng.randint(1, 3)]]
        cost = SimpleNamespace(
            linear_exponent=rng.choice((1.0, 1.5, 4.0, float("inf"))), factor_points=points,
            linear_s_per_token=rng.choice((1e-6, 1e-4)), activations_s_per_token=rng.choice((0.0, 1e-6, 2e-4)),
            linear_weights_s=rng.choice((1e-3, 0.02)),
        )  # fmt: skip
        tangent = rng.choice(tangents(min(cost.linear_exponent, 9.0), 7))
        yield f"share {place}: {rounded(_share_below(cost, *tangent))}"  # pyright: ignore[reportArgumentType]


def works() -> Iterator[str]:
    """Least work of crowds, and what it costs."""
    known = list(costs())
    for place in range(WORKS):
        rng = random.Random(f"work {place}")
        label, cost = rng.choice(known)
        limit, requests = limits_of(rng, rng.random() < 0.5), crowd(rng)
        work, may_fail = least_work(requests, limit, cost)
        found = [rounded(column.tolist()) for column in work], may_fail.tolist()
        own = step_prices(cost, limit.block_size, limit.num_gpu_blocks)[::9]
        seconds = [rounded(table.tolist()) for table in priced(work, own, limit, cost)] if own else []
        sums = [round(float(column.sum()), 6) for column in work]
        yield f"work {place} of {label}: {sums} {digest(found)}, priced {digest(seconds)}"


def times() -> Iterator[str]:
    """Deadlines, the least of stretches, and who can have a first token in time."""
    for place in range(TIMES):
        rng = np.random.default_rng(place)
        count = int(rng.integers(1, 9))
        arrivals = np.sort(rng.choice((0.0, 0.5, 1.0, 1.25, 3.0), count))
        outputs = rng.choice((1, 2, 10), count)
        slo = Goodput(*(None if rng.random() < 0.4 else value for value in (0.5, 0.05, 0.75)))
        first, last = deadlines(arrivals, outputs, slo)
        prompts, values = (
            rng.choice((0.0, 0.125, 0.25, 0.5, 0.6), count),
            rng.choice((-1.0, 0.0, 0.25, 0.5, 1.0), count),
        )
        most = most_in_time(arrivals, first, prompts, values)
        bins = int(rng.integers(1, 12))
        own, lengths = rng.choice((-0.5, 0.0, 0.25, 1.0, 2.0), bins), rng.choice((0.5, 1.0), bins)
        begin = rng.integers(0, bins, count)
        end = np.minimum(bins - 1, begin + rng.integers(0, bins, count))
        later = np.minimum(bins - 1, end + 1)
        least = least_within(own, begin, end).tolist()
        proved = certified(own, begin, end, later, prompts, prompts[::-1], lengths)
        yield f"times {place}: {digest(rounded([first.tolist(), last.tolist(), least]))} {rounded([most, proved])}"


def goodputs() -> Iterator[str]:
    """The bound itself, of engines that serve hardly anybody and all."""
    known = [(label, cost) for label, cost in costs() if "linear" in label or label.startswith(MODELS[:2])]
    for place in range(GOODPUTS):
        rng = random.Random(f"goodput {place}")
        label, cost = rng.choice(known)
        limit, requests = limits_of(rng, rng.random() < 0.5), crowd(rng, rng.choice((0, 1, 12, 30)))
        slo = Goodput(*(None if rng.random() < 0.4 else value for value in (rng.choice((0.1, 0.5)), 0.04, 2.0)))
        found = goodput_bound(requests, limit, cost, slo, rng.choice((1, 2)))
        told = None if found is None else [f"{value:.5g}" for value in (*found, found.goodput)]
        yield f"goodput {place} of {label}: {told}"


PINNED = {"prices": prices, "works": works, "times": times, "goodputs": goodputs}


def main() -> None:
    write(BOUNDS, PINNED)


if __name__ == "__main__":
    main()
