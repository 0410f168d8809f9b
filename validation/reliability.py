"""What docs/reliability.md promises, tried with as many bad inputs, kills, second writers and full disks as one likes.

    python validation/reliability.py --seed 7 --cases 1000 [--kinds options,kills] [--counts counts.json]

The cases are drawn by `bad_input`: the same seed draws the same ones (when a kill comes is up to the
machine). Prints a row a kind: cases, outcomes, faults, CPU seconds; then each fault with its command. Exit status 1 if
there is any. `--counts` adds the counts to those that a file has, so that a large number can be run in pieces.
"""

import argparse
import json
import resource
import sys
from collections import Counter
from pathlib import Path

from bad_input import KINDS, counted, try_cases


def cpu_s() -> float:
    """Of this process and those that it waited for, s."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True, help="of the cases; one that was not run before")
    parser.add_argument("--cases", type=int, default=100, help="of each kind (100)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, with commas between them (all)")
    parser.add_argument("--counts", type=Path, help="JSON file that the counts are added to")
    asked = parser.parse_args()
    before = json.loads(asked.counts.read_text()) if asked.counts and asked.counts.exists() else {}
    found = 0
    for kind in asked.kinds.split(","):
        begin_s = cpu_s()
        counts, faults = counted(try_cases(kind, asked.seed, asked.cases))
        told = ", ".join(f"{outcome} {number}" for outcome, number in counts.most_common())
        print(f"{kind}: {counts.total()} cases, {told}; {len(faults)} faults; {cpu_s() - begin_s:.0f} s", flush=True)
        for fault in faults:
            print(f"  {fault.what}: {fault.told!a}\n    {fault.case!a}", flush=True)
        found += len(faults)
        before[kind] = dict(Counter(before.get(kind, {})) + counts)
        if asked.counts:
            asked.counts.write_text(json.dumps(before, indent=1) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
