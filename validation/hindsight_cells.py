"""What hindsight would have reached on drawn cells: which requests to serve, known with their lengths beforehand.

    python validation/hindsight_cells.py 2509 2511 2513   # seeds of `drawn_cells.py`, each at the load that it drew
    python validation/hindsight_cells.py 2506 --spans 2   # arrivals last as many spans of a request, at least

`adaptive` is told all lengths, and gets some of the requests alone: those that `offline_cells.chosen` names for several
shares of the engine's time, then `--rounds` times the best so far with some exchanged. What is good of the best is
reachable. Where the bound is far above it, the bound may be loose; where `adaptive` is far below, the policy loses.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from drawn_cells import Cell, Name, drawn, good_of, run, setup_of
from offline_cells import chosen

from sim.results.goodput import Goodput
from sim.run.traffic import traffic
from traces.request import Request

SHARES_OF_TIME = (0.7, 0.8, 0.9, 1.0, 1.1)
ADDED, DROPPED, LEAST_ADDED, FEWER = 0.1, 0.02, 0.02, 0.93
"""Shares of the best that are exchanged in a round; fewer are added after each that found nothing better."""
HEAD = "| seed | requests | `adaptive` | lengths known | hindsight | bound |"


def good_ids(cell: Cell, requests: Sequence[Request], policy: str, spans: int) -> frozenset[int]:
    """Which of `requests` meet their SLOs where they are all that arrive."""
    scenario = cell.scenario(cell.load, spans=spans)
    setup, slo = setup_of(cell, scenario, policy), Goodput.parse(scenario.goodput)
    rows = run(setup, setup, requests).log.rows
    assert rows is not None
    return frozenset(row[0] for row in rows if row[9] != "ignored" and slo.met(row[5], row[6], row[7]))


def row(seed: int, spans: int, rounds: int) -> str:
    """Good requests of the policy, with lengths known, with hindsight, and of the bound."""
    cell = drawn(seed)
    scenario = cell.scenario(cell.load, spans=spans)
    requests, setup = list(traffic(scenario)), setup_of(cell, scenario, "adaptive")

    def served(ids: frozenset[int]) -> frozenset[int]:
        return good_ids(cell, [one for one in requests if one.request_id in ids], "adaptive:predictor=oracle", spans)

    everything = frozenset(one.request_id for one in requests)
    as_it_is, known = good_ids(cell, requests, "adaptive", spans), served(everything)
    slo = Goodput.parse(scenario.goodput)
    tried = [served(chosen(requests, setup, slo, share)) for share in SHARES_OF_TIME]
    best = max([as_it_is, known, *tried], key=len)
    rng, added = np.random.default_rng(seed), ADDED
    tokens = {one.request_id: one.prompt_tokens + one.output_tokens for one in requests}
    for _ in range(rounds):
        cheap = sorted(everything - best, key=lambda one: tokens[one] * rng.uniform(0.6, 1.4))
        kept = frozenset(one for one in sorted(best) if rng.random() >= DROPPED)
        found = served(kept | set(cheap[: int(added * len(best)) + 1]))
        if len(found) >= len(best):
            best = found
        else:
            added = max(LEAST_ADDED, added * FEWER)
    bound = good_of(cell, scenario, requests, Name("bound"))
    counts = len(requests), len(as_it_is), len(known), len(best), int(bound)
    return f"| {seed} | " + " | ".join(f"{count:,}" for count in counts) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--spans", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    print(HEAD, "|" + "--:|" * (HEAD.count("|") - 1), sep="\n")
    for seed in arguments.seeds:
        print(row(seed, arguments.spans, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
