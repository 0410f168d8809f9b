"""Where an engine's seconds go on drawn cells, until the last good request has ended: by what became of the requests.

    python validation/cell_seconds.py 1542 1639 1644   # seeds of `drawn_cells.py`, each at the load that it drew

An iteration's decodes take what they would by themselves, an equal share each; its prompts the rest, by their tokens.
"""

import argparse

from drawn_cells import drawn, run, setup_of

from sim.engine.plan import IterationPlan, StepTimes
from sim.run.traffic import traffic

HEAD = "| seed | good | of | seconds | good | late first token | TPOT missed | prompts | tokens a chunk |"


def row(seed: int, policy: str) -> str:
    """The row of a cell: good requests of all, seconds in all and of each kind, the prompts' share, their chunks."""
    cell = drawn(seed)
    scenario = cell.scenario(cell.load)
    requests, setup = list(traffic(scenario)), setup_of(cell, scenario, policy)
    seconds: list[tuple[float, float, dict[int, float]]] = []
    chunks: list[tuple[float, int]] = []

    def observe(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        took_s, of = times.end_s - start_s, dict[int, float]()
        decodes_s = 0.0
        if plan.num_decodes:
            decodes_s = took_s
            if plan.chunks:
                contexts = plan.decode_context_tokens, plan.decode_window, plan.decode_longest_tokens
                decodes_s = min(took_s, setup.cost.decode_steps(plan.num_decodes, *contexts)[0])
            of = {seq.request.request_id: decodes_s / plan.num_decodes for seq in plan.decodes}
        for chunk in plan.chunks:
            of[chunk.seq.request.request_id] = (took_s - decodes_s) * chunk.num_new / plan.prefill_tokens
        seconds.append((start_s, took_s - decodes_s if plan.chunks else 0.0, of))
        if plan.chunks:
            chunks.append((start_s, plan.prefill_tokens))

    ended = run(setup, setup, requests, observe).log.rows
    assert ended is not None
    kinds: dict[int, str] = {}
    last_s = 0.0
    for request_id, arrival_s, _, _, _, ttft_s, tpot_s, e2el_s, _, status in ended:
        is_late = status == "ignored" or 1e3 * ttft_s > cell.ttft_slo_ms
        is_slow = 1e3 * tpot_s > cell.tpot_slo_ms
        kinds[request_id] = "late" if is_late else "slow" if is_slow else "good"
        if kinds[request_id] == "good":
            last_s = max(last_s, arrival_s + e2el_s)
    by_kind: dict[str, float] = dict.fromkeys(("good", "late", "slow"), 0.0)
    prompts_s = 0.0
    for start_s, of_prompts_s, of in seconds:
        if start_s < last_s:
            prompts_s += of_prompts_s
            for request_id, each_s in of.items():
                by_kind[kinds[request_id]] += each_s
    tokens = [num_tokens for start_s, num_tokens in chunks if start_s < last_s]
    in_all_s = last_s - requests[0].arrival_s
    of_kinds = " | ".join(f"{each_s:.1f}" for each_s in by_kind.values())
    num_good = sum(kind == "good" for kind in kinds.values())
    shares = f"{prompts_s / in_all_s:.0%} | {sum(tokens) / max(1, len(tokens)):.0f}".replace("%", " %")
    return f"| {seed} | {num_good:,} | {len(requests):,} | {in_all_s:.1f} | {of_kinds} | {shares} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--policy", default="adaptive")
    arguments = parser.parse_args()
    print(HEAD, "|---" + "|--:" * (HEAD.count("|") - 2) + "|", sep="\n")
    for seed in arguments.seeds:
        print(row(seed, arguments.policy), flush=True)


if __name__ == "__main__":
    main()
