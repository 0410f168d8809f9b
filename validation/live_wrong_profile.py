"""What a profile that is wrong costs `adaptive` live: a small model, on this machine's CPU.

    OMP_NUM_THREADS=1 python validation/live_wrong_profile.py OUT [--profile cpu-measured.json] [--runs 5]

Model, traffic, SLOs and clock are those of `live_ranking.py`. In turns, a round each, `adaptive` is told that the CPU
is as fast as measured, a sixth slower or a quarter faster (`drawn_cells.TOLD`). Printed are the good requests over
those of the same round with the profile as measured.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

from drawn_cells import TOLD, run
from live_ranking import prepared, simulated, slos_ms

from gpu_runtime.live import LiveOptions, load_decoder, perform
from gpu_runtime.twin.probe import machine_slowness
from sim.options.policies import parse_policy
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.traffic import traffic


def main() -> None:
    """Rounds of live runs, and what they should have come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=300)
    parser.add_argument("--load", type=float, default=1.5, help="times the rate at which vllm-v1 drains a full queue")
    arguments = parser.parse_args()
    base = prepared(arguments.out, arguments.profile, arguments.num_prompts)
    ttft_ms, tpot_ms = slos_ms(base)
    rate = arguments.load * simulated(base, "vllm-v1")[1]
    true = replace(base, request_rate=rate, goodput=(f"ttft:{ttft_ms}", f"tpot:{tpot_ms}"))
    policy = parse_policy(f"adaptive:ttft-slo-ms={ttft_ms},tpot-slo-ms={tpot_ms}", {})
    setups = {speed: prepare(replace(true, profile=f"{base.profile}:gpu_speed={speed}"), *policy) for speed in TOLD}
    setups = {1.0: prepare(true, *policy), **setups}
    requests, options = list(traffic(true)), LiveOptions("cpu")
    decoder = load_decoder(base.model, "float32", options)
    there = {speed: run(setups[1.0], told, requests).engines[0].log.good for speed, told in setups.items()}
    here: dict[float, list[int]] = {speed: [] for speed in setups}
    slowness = []
    for _ in range(arguments.runs):
        for speed, told in setups.items():
            slowness.append(machine_slowness(true, decoder, options))
            lived = perform(told, requests, None, Recording(), decoder, options)
            if lived.interrupted:
                raise KeyboardInterrupt
            here[speed].append(lived.log.good)
            print(f"told {speed:g}: {here[speed][-1]} good, simulated {there[speed]}", flush=True)
    print(f"\n{len(requests)} requests at {rate:.1f}/s, TTFT {ttft_ms} ms, TPOT {tpot_ms} ms. The machine took")
    print(f"{median(slowness):.2f} times its profile's time ({min(slowness):.2f} to {max(slowness):.2f}).\n")
    print("| told a CPU | simulated | live, median | least | most |\n|---|--:|--:|--:|--:|")
    for speed in TOLD:
        shares = [good / right for good, right in zip(here[speed], here[1.0], strict=True)]
        figures = there[speed] / there[1.0], median(shares), min(shares), max(shares)
        print(f"| {speed:g} times as fast | " + " | ".join(f"{100 * share:.1f} %" for share in figures) + " |")


if __name__ == "__main__":
    main()
