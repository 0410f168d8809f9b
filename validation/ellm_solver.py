"""eLLM's choice of b and r: our exact solver against SciPy's SLSQP, which the paper takes (3 to 6 ms a step, Fig. 16).

    python validation/ellm_solver.py [--batches 100]

Batches of up to 512 sequences at random points of their answers: lengths as ShareGPT's (log-normal, means 222 and 1,346
tokens) and L-Eval's (35,956 and 5,189), the paper's means; shapes are assumed. Llama-2-13B on one A100-80G and 70B on
four, the paper's SLOs. Printed: microseconds of a solve (CPU time, the least of three), for one configuration and for
all six; the median ratio of the two solvers pair by pair; how much worse SLSQP's T/b is at worst, as it would be
deployed (b rounded down); how often it finds nothing feasible where there is something; and the largest over the
smallest b of three starts, the median.
"""

import argparse
from statistics import median
from time import process_time

import numpy as np
from ellm_slsqp import solve

from sim.specs.models import ModelSpec, load_model
from sim.systems.ellm.equations import CONFIGURATIONS, Configuration, StepCosts, corrected_times, paper_times
from sim.systems.ellm.solver import Batch, Choice, Memory, best

GPU_BYTES, PEAK_FLOPS = 80e9, 312e12
SETUPS = (
    ("llama-2-13b", 1, "ShareGPT", (222, 1346), 0.05),
    ("llama-2-70b", 4, "ShareGPT", (222, 1346), 0.5),
    ("llama-2-13b", 1, "L-Eval", (35_956, 5_189), 0.06),
    ("llama-2-70b", 4, "L-Eval", (35_956, 5_189), 0.2),
)
FIRST = Configuration(3, 2)
STARTS = (0.1, 0.5, 0.9)
REPEATS = 3


def lengths_of(means: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Up to 512 contexts, each somewhere in its answer."""
    count = int(random.integers(32, 513))
    prompts, outputs = (random.lognormal(np.log(mean) - 0.5, 1.0, count) for mean in means)
    return np.maximum(1, np.round(prompts + outputs * random.random(count)))


def times_of(model: ModelSpec, gpus: int, equations: str) -> StepCosts:
    """The printed equations at peak, or the corrected ones at rates as measured on an A100."""
    if equations == "paper":
        return paper_times(model, gpus * PEAK_FLOPS)
    return corrected_times(
        model,
        flops_per_s=0.7 * gpus * PEAK_FLOPS,
        bytes_per_s=gpus * 1.5e12,
        h2d_bytes_per_s=gpus * 25e9,
        fixed_s=0.006,
    )


def timed(solve_once) -> tuple[float, Choice | None]:  # noqa: ANN001 - a function without arguments
    """Seconds of one solve, the least of `REPEATS`, and its answer."""
    seconds, answer = [], None
    for _ in range(REPEATS):
        begun_s = process_time()
        answer = solve_once()
        seconds.append(process_time() - begun_s)
    return min(seconds), answer


def compare(setup: tuple, equations: str, batches: int) -> str:
    """One row."""
    name, gpus, traffic, means, slo_s = setup
    model, random = load_model(name), np.random.default_rng(0)
    times, paper = times_of(model, gpus, equations), equations == "paper"
    room_bytes = 0.9 * gpus * GPU_BYTES - model.weight_bytes()
    scratch = tuple(c.scratch_layers / model.num_layers for c in CONFIGURATIONS)
    memory = Memory(room_bytes / model.kv_bytes_per_token(), scratch)
    one = memory._replace(scratch=(scratch[CONFIGURATIONS.index(FIRST)],))
    ours_s, theirs_s, gaps, spreads, missed, all_six = [], [], [], [], 0, []
    for _ in range(batches):
        lengths = lengths_of(means, random)
        batch = Batch(lengths)
        # Both from the lengths, for the one configuration that the paper begins with; then ours for all six.
        seconds, exact = timed(
            lambda lengths=lengths: best(
                times, Batch(lengths), one, slo_s, configurations=(FIRST,), all_recomputed=paper
            )
        )
        six_s, _ = timed(lambda lengths=lengths: best(times, Batch(lengths), memory, slo_s, all_recomputed=paper))
        found = [
            timed(
                lambda start=start, batch=batch: solve(
                    times,
                    batch,
                    one,
                    slo_s,
                    (start * len(batch.seqs), start),
                    configuration=FIRST,
                    all_recomputed=paper,
                )
            )
            for start in STARTS
        ]
        ours_s.append(seconds)
        all_six.append(six_s)
        theirs_s.append(median(s for s, _ in found))
        answers = [answer for _, answer in found if answer is not None]
        if exact is not None:
            missed += len(STARTS) - len(answers)
            gaps += [answer.s_per_token / exact.s_per_token - 1.0 for answer in answers]
            if answers:
                sizes = [answer.batch_size for answer in answers]
                spreads.append(max(sizes) / min(sizes))
    ratio = median(b / a for a, b in zip(ours_s, theirs_s, strict=True))
    six = median(b / a for a, b in zip(all_six, theirs_s, strict=True))
    return (
        f"{name:12} {traffic:9} {equations:10} {median(theirs_s) * 1e6:8.0f} {median(ours_s) * 1e6:7.0f} {ratio:6.1f}x "
        f"{median(all_six) * 1e6:8.0f} {six:6.1f}x {max(gaps, default=0.0):9.1%} "
        f"{missed:4}/{len(STARTS) * batches} {median(spreads) if spreads else 1.0:7.2f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100)
    batches = parser.parse_args().batches
    print("model        lengths   equations  SLSQP us exact us  ratio   six us   ratio  worst gap   missed  b max/min")
    for setup in SETUPS:
        for equations in ("paper", "corrected"):
            print(compare(setup, equations, batches), flush=True)


if __name__ == "__main__":
    main()
