"""DeepEP's kernels as timed and as priced: fits `sim/cost/deepep.json`, and says how far rows left out are off.

python validation/deepep.py FOLDER            # a checkout of ai-dynamo/aiconfigurator, .../systems/data
python validation/deepep.py FOLDER --write    # and write the constants

Within a node constants are fitted to shapes of 128 experts and more of SGLang 0.5.12's tables (hidden size, experts
chosen, experts), 20 SMs; up to 16,384 tokens a GPU. To check, each shape is priced by a fit to the others. Between
nodes there is one shape, of DeepSeek V3 (0.5.6.post2; H200's rows repeat H100's): a launch and a rate for each number
of nodes. To check, rows of 96 to 256 tokens are priced by a fit to the others. High throughput counts the time to tell
counts (`notify`). On eight nodes it does not ship: its rows are far from what DeepEP's own table says of 64 GPUs.

Printed last: DeepEP's README, of H800, whose NVLink is slower and whose RDMA is as fast (128 tokens, 7,168 elements).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
from scipy.optimize import nnls

from calib.importers.aiconfigurator import read_rows
from calib.report import percent, table
from sim.cost.all2all import HEADER_BYTES, SCALED, TABLES, Kernel, Pair, Timed, met
from sim.specs.expert_layout import HIGH_THROUGHPUT, LOW_LATENCY

SYSTEMS = {"h100_sxm": 8, "h200_sxm": 8, "b200_sxm": 8, "b300_sxm": 8, "gb200": 4}
"""And their GPUs a node."""
FILES = {LOW_LATENCY: "wideep_deepep_ll_perf.parquet", HIGH_THROUGHPUT: "wideep_deepep_normal_perf.parquet"}
ONE_NODE, NODES = "0.5.12", "0.5.6.post2"
MOST_NODES = {LOW_LATENCY: 8, HIGH_THROUGHPUT: 4}
SMS, MOST_TOKENS, LEAST_EXPERTS = 20, 16384, 128
SHAPE = ("hidden_size", "num_topk", "num_experts", "num_token", "node_num")
README = {1: (77, 114), 2: (118, 195), 4: (155, 273), 8: (173, 314)}
"""Microseconds of low latency by nodes of 8 H800."""
SLACK = 0.1
"""Relative error from which a row weighs less."""


class Row(msgspec.Struct, frozen=True):
    shape: tuple[int, int, int]
    tokens: int
    nodes: int
    rows: float
    row_bytes: float
    seconds: float


def rows_of(path: Path, backend: str, phase: str, gpus: int) -> Iterator[Row]:
    """What a table has of one kernel."""
    low = backend == LOW_LATENCY
    times = (f"{phase}_avg_t_us",) if low else (f"{phase}_transmit_us", f"{phase}_notify_us")
    for row in read_rows(path, (*SHAPE, *times), ("dispatch_sms",)):
        if row.get("dispatch_sms", SMS) != SMS or row["num_token"] > MOST_TOKENS or row["num_experts"] < LEAST_EXPERTS:
            continue
        hidden, chosen, experts, tokens, nodes = (int(row[name]) for name in SHAPE)
        row_bytes = 2.0 * hidden if phase == "combine" else hidden + hidden // SCALED * 4 + HEADER_BYTES * low
        sent = float(chosen) if low else met(gpus if nodes == 1 else nodes, experts, chosen)
        sent *= 1 - 1 / nodes if nodes > 1 else 1
        seconds = sum(row[name] for name in times) / 1e6
        yield Row((hidden, chosen, experts), tokens, nodes, tokens * sent, row_bytes, seconds)


def fitted(rows: list[Row]) -> Kernel:
    """Least relative errors, of which those beyond `SLACK` count less; no constant is negative."""
    seconds, columns = np.array([row.seconds for row in rows]), [np.ones(len(rows))]
    sent, sizes = np.array([row.rows for row in rows]), np.array([row.row_bytes for row in rows])
    if rows[0].nodes == 1:
        columns += [np.array([row.shape[2] for row in rows]), sizes, sent]
    terms = np.stack([*columns, sent * sizes], 1) / seconds[:, None]
    scale, weights, found = terms.max(0), np.ones(len(rows)), np.zeros(terms.shape[1])
    for _ in range(20):
        found = nnls(terms / scale * weights[:, None], weights)[0] / scale
        weights = 1 / np.sqrt(np.maximum(1, np.abs(terms @ found - 1) / SLACK))
    launch_s, *rest, s_per_byte = (float(f"{value:.4g}") for value in found)
    return Kernel(launch_s, float(f"{1 / s_per_byte:.4g}"), *rest)


def off(kernel: Kernel, rows: list[Row]) -> list[float]:
    """Relative errors."""
    return [kernel.seconds(row.rows, row.row_bytes, row.shape[2]) / row.seconds - 1 for row in rows]


def left_out(rows: list[Row]) -> list[float]:
    """Errors of shapes, or on several nodes of tokens, that no fit had seen."""
    if rows[0].nodes > 1:
        unseen = [row for row in rows if not _is_fitted(row)]
        return off(fitted([row for row in rows if _is_fitted(row)]), unseen)
    shapes = {row.shape for row in rows}
    folds = [([r for r in rows if r.shape != shape], [r for r in rows if r.shape == shape]) for shape in shapes]
    return [error for others, own in folds for error in off(fitted(others), own)]


def _is_fitted(row: Row) -> bool:
    return row.tokens <= 64 or row.tokens % 512 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    known, shown = {}, []
    for system, gpus in SYSTEMS.items():
        found: dict[str, dict[str, Pair]] = {}
        for backend, name in FILES.items():
            paths = [asked.folder / system / "comm" / "sglang" / version / name for version in (ONE_NODE, NODES)]
            kernels: dict[str, dict[str, Kernel]] = {}
            for phase in ("dispatch", "combine"):
                rows = [row for row in rows_of(paths[0], backend, phase, gpus) if row.nodes == 1]
                if paths[1].exists():
                    most = MOST_NODES[backend]
                    rows += [row for row in rows_of(paths[1], backend, phase, gpus) if 1 < row.nodes <= most]
                for nodes in sorted({row.nodes for row in rows}):
                    own = [row for row in rows if row.nodes == nodes]
                    kernels.setdefault(str(nodes), {})[phase] = fitted(own)
                    errors = [*map(abs, left_out(own))]
                    shown.append(
                        (
                            system,
                            backend,
                            str(nodes),
                            phase,
                            str(len(errors)),
                            percent(fmean(errors)),
                            percent(max(errors)),
                        )
                    )
            found[backend] = {nodes: Pair(**pair) for nodes, pair in kernels.items()}
        source = f"ai-dynamo/aiconfigurator 095f58a (NVIDIA, Apache-2.0), {system}/comm/sglang"
        known[system.removesuffix("_sxm")] = Timed(gpus, source, **found)
    print(table(("GPU", "backend", "nodes", "kernel", "rows", "error", "worst"), shown))
    for nodes, measured in README.items():
        pair = known["h100"].deepep_low_latency[str(nodes)]
        row_bytes, sent = 7168 + 56 * 4 + HEADER_BYTES, 128 * 8 * (1 - 1 / nodes if nodes > 1 else 1)
        ours = pair.dispatch.seconds(sent, row_bytes, 256), pair.combine.seconds(sent, 14336, 256)
        both = zip(measured, ours, strict=True)
        print(f"{8 * nodes} H800, measured / of H100 (us):", *(f"{us} / {1e6 * s:.0f}" for us, s in both))
    if asked.write:
        TABLES.write_text(json.dumps(msgspec.to_builtins(known), indent=1) + "\n")


if __name__ == "__main__":
    main()
