"""Tables of whole steps: prompt time and token time by model, GPU, prompt and batch (as Splitwise's `perf_model.csv`).

Columns: `model, hardware, tensor_parallel, prompt_size, batch_size, token_size, prompt_time, token_time`, times in ms,
repeats as further rows. A token time is the mean over `token_size` tokens, so its context is the prompt and half of
those.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from calib.importers.tables import Table
from calib.samples import Sample, spread_s
from sim.errors import UserError
from sim.specs.models import load_model

MS = 1e-3
REQUIRED = ("model", "prompt_size", "batch_size", "token_size", "prompt_time", "token_time")


def import_samples(path: Path, hardware: str, models: Mapping[str, str]) -> tuple[list[Sample], dict[str, str]]:
    """Samples of whole iterations, with where they come from.

    Args:
        path: the table.
        hardware: the value of its column `hardware` to take; empty where it has none.
        models: names in the table to names or config paths of ours; models not named are left out.
    """
    table = Table(path, REQUIRED)
    for ours in models.values():
        load_model(ours)
    times: defaultdict[tuple[str, int, int, int, int], list[float]] = defaultdict(list)
    for row in range(len(table)):
        name = table.text(row, "model")
        if name not in models or table.text(row, "hardware") != hardware:
            continue
        tp = table.integer(row, "tensor_parallel", 1)
        prompt, batch = table.integer(row, "prompt_size"), table.integer(row, "batch_size")
        context = prompt + table.integer(row, "token_size") // 2
        times[models[name], tp, batch, prompt, 0].append(table.number(row, "prompt_time") * MS)
        times[models[name], tp, batch, 1, context].append(table.number(row, "token_time") * MS)
    if not times:
        seen = {(table.text(row, "model"), table.text(row, "hardware")) for row in range(len(table))}
        shown = "; ".join(f"{model} on {gpu or 'no hardware named'}" for model, gpu in sorted(seen))
        raise UserError(f"{path}: nothing of model {', '.join(models)} on {hardware!r}: it has {shown}")
    samples = [_sample(key, values) for key, values in sorted(times.items())]
    return samples, {
        "tables": f"{path.name}: whole steps, rows of hardware {hardware!r}",
        "models": ", ".join(f"{theirs} as {ours}" for theirs, ours in models.items()),
        "missing": "PCIe copies: not in the table",
    }


def _sample(key: tuple[str, int, int, int, int], values: list[float]) -> Sample:
    model, tp, batch, new, context = key
    return Sample(
        op="step",
        latency_s=median(values),
        spread_s=spread_s(values),
        repeats=len(values),
        model=model,
        tp=tp,
        num_layers=load_model(model).num_layers,
        batch_size=batch,
        new_tokens=new,
        context_tokens=context,
    )
