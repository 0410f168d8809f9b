"""What `tune` says: the answer in sentences, the candidates as a table with their Pareto front, a picture."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from sim.files import write_atomically
from sim.results.figures.style import FAINT, dress, new_figure, plain_text, policy_colour, save_figure, set_title
from sim.study.intervals import CONFIDENCE, geometric_mean, of_another_draw
from sim.study.limits import BINDS, MORE, Gain
from sim.study.search import PRECISION
from sim.study.sweep import engines_of_runs_differ, told_where
from sim.study.tables import Frame, plain
from sim.study.tune import Candidate, Tuned

FRONT = ("p99_ttft_ms", "p99_tpot_ms", "output_throughput_per_gpu")
"""What the Pareto front is over: least, least, most."""
UNITS = {"load": "requests/s", "goodput": "requests/s within the SLOs"}
MOST_BARS = 14
MOST_NAMED = 5
MUCH = 10.0
"""Factor of load beyond which a gain is not told apart: a short trace can come all at once."""


def name_of(tuned: Tuned, candidate: Candidate) -> str:
    """A candidate by its policy and all its other axes' values."""
    return ", ".join([_policy(tuned, candidate), *_words(candidate.point)])


def short_names(tuned: Tuned) -> list[str]:
    """Candidates by the values that no more than half of them share; by their policy if none is left."""
    counts = Counter(item for candidate in tuned.candidates for item in candidate.point.items())
    rare = {item for item, count in counts.items() if 2 * count <= len(tuned.candidates)}
    names = []
    for candidate in tuned.candidates:
        own = {name: value for name, value in candidate.point.items() if (name, value) in rare}
        words = _words(own)
        names.append(", ".join([_policy(tuned, candidate), *words] if "policy" in own or not words else words))
    return names


def _policy(tuned: Tuned, candidate: Candidate) -> str:
    return str(candidate.point.get("policy") or next(iter(tuned.study.fixed.get("policy", ())), "vllm-v1"))


def _words(point: Mapping[str, Any]) -> list[str]:
    return [f"{name.replace('_', '-')} {plain(value)}" for name, value in point.items() if name != "policy"]


def candidates_table(tuned: Tuned) -> Frame:
    """A row for each candidate, the best first: axes, `value`, what the run that shows it measured, `pareto`."""
    rows = []
    for candidate in tuned.candidates:
        row: dict[str, Any] = {name: plain(value) for name, value in candidate.point.items()}
        row |= {"value": candidate.value, "unit": UNITS[tuned.goal], "error": candidate.refusal}
        ran = candidate.ran
        if ran is not None and ran.result is not None:
            row |= {"num_gpus": ran.num_gpus, "load": _load(candidate) if tuned.goal == "load" else 1.0}
            low, high = _ends(candidate)
            row |= {"draws": len(candidate.values), "low": low, "high": high}
            row |= {name: ran.result[name] for name in (*FRONT[:2], "mean_ttft_ms", "mean_tpot_ms", "request_goodput")}
            row |= {slo.metric: ran.result[slo.metric] for slo in tuned.slos}
            row[FRONT[2]] = ran.result["output_throughput"] / ran.num_gpus
        rows.append(row)
    found: Frame = pd.DataFrame(rows)
    if FRONT[2] in found:
        found["pareto"] = on_front(np.asarray(found[list(FRONT)], dtype=float) * np.array([1.0, 1.0, -1.0]))
    return found


def on_front(values: np.ndarray) -> np.ndarray:
    """Which rows no other row is as good as in every column and better in one; less is better. NaN never is."""
    known = np.array([not np.isnan(row).any() for row in values], dtype=bool)
    beaten = [bool((np.all(values <= row, axis=1) & np.any(values < row, axis=1) & known).any()) for row in values]
    return known & ~np.array(beaten, dtype=bool)


def lines(tuned: Tuned) -> Iterator[str]:
    """The answer, what binds it, what more would buy, and how sure it is."""
    wanted = " and ".join(map(str, tuned.slos))
    best = tuned.best
    if told := engines_of_runs_differ(
        candidate.ran.result for candidate in tuned.candidates if candidate.ran is not None
    ):
        yield told
    if best is None or best.ran is None or best.ran.result is None:
        most = {"load": "whatever the load", "goodput": "at this traffic"}[tuned.goal]
        yield f"No candidate meets {wanted}, {most}."
        yield from _without_value(tuned)
        return
    yield f"{name_of(tuned, best)}: {_reached(tuned, best)} with {wanted}."
    yield from _next_to(tuned, best)
    tied = tuned.tied
    if tied:
        yield f"As good, as far as the search can tell: {', '.join(name_of(tuned, c) for c in tied[:MOST_BARS])}."
    if alike := tuned.indifferent:
        yield f"What makes no difference there: {', '.join(name.replace('_', '-') for name in alike)}."
    others = [c for c in tuned.candidates if c is not best and c.value is not None]
    for other in others[:MOST_BARS]:
        yield f"  {name_of(tuned, other)}: {_reached(tuned, other)}"
    yield from _without_value(tuned)
    yield from _by_default(tuned)
    yield from gain_lines(tuned.gains, tuned.binds, "goodput" if tuned.goal == "goodput" else "load")
    yield f"How sure: {_over_draws(tuned, best)}."
    yield _by_speed(tuned, best)


def _by_default(tuned: Tuned) -> Iterator[str]:
    """That pools against like engines hangs on the token budget, where none was named."""
    named = {*tuned.study.fixed, *(name for candidate in tuned.candidates for name in candidate.point)}
    runs = [c.ran for c in tuned.candidates if c.ran is not None and c.ran.result is not None]
    if "max_num_batched_tokens" not in named and len({"prefill_replicas" in ran.options for ran in runs}) > 1:
        budgets = {ran.result["scenario"]["max_num_batched_tokens"] for ran in runs if ran.result} - {None}
        values = " or ".join(f"{budget:,}" for budget in sorted(budgets))
        yield (
            f"Not searched: max-num-batched-tokens ({values} by default). Pools against like engines hangs on it: "
            "give an axis of it, or ask kvtwin plan, which searches it."
        )


def _without_value(tuned: Tuned) -> Iterator[str]:
    """Candidates that ran and missed the SLOs, and, apart, those that could not be run or told, by their reasons."""
    missed = [c for c in tuned.candidates if c.value is None and c.refusal is None]
    if missed and tuned.best is not None:
        yield f"  {len(missed)} never meet them: {', '.join(name_of(tuned, c) for c in missed[:MOST_NAMED])}"
    reasons: dict[str, list[Candidate]] = {}
    for candidate in tuned.candidates:
        if candidate.refusal is not None:
            reasons.setdefault(candidate.refusal, []).append(candidate)
    for reason, refused in reasons.items():
        names = ", ".join(name_of(tuned, c) for c in refused[:MOST_NAMED])
        yield f"  {len(refused)} could not be tried ({names}): {reason}"


def _reached(tuned: Tuned, candidate: Candidate) -> str:
    value = candidate.value or 0.0
    if tuned.goal == "goodput":
        return f"{value:.3g} requests/s within the SLOs of the scenario"
    least = "at least " if any(one.unknown for one in candidate.reached) else ""
    alone = " (as it is)" if len(candidate.values) < len(tuned.candidates[0].values) else ""
    return f"{least}{value:.3g} requests/s, {_load(candidate):.3g} times the traffic{alone}"


def _load(candidate: Candidate) -> float:
    """Times the traffic, on the mean of the draws."""
    return geometric_mean([one.most for one in candidate.reached])


def _ends(candidate: Candidate) -> tuple[float | None, float | None]:
    """The ends of what another like draw gives with 95 %."""
    return candidate.interval if len(candidate.known) > 1 else (None, None)


def _load_ends(candidate: Candidate) -> tuple[float, float]:
    """The same of the load that it sustains, in times the traffic."""
    return of_another_draw([one.most for one in candidate.reached], PRECISION)


def _measured(slos: Sequence[Any], result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "the run fails"
    return ", ".join(
        f"{slo.metric} {four_digits(result[slo.metric])}" for slo in slos if result[slo.metric] is not None
    )


def four_digits(value: float) -> str:
    """Four digits, never as a power of ten: `14,860`, `80.32`."""
    return f"{value:,.0f}" if abs(value) >= 1000.0 else f"{value:.4g}"


def _next_to(tuned: Tuned, best: Candidate) -> Iterator[str]:
    reached = best.reached[0]
    if tuned.goal == "goodput" or reached.ran is None:
        return
    where = "There" if len(best.values) == 1 else f"On the traffic as it is, at {reached.most:.3g} times it,"
    text = f"{where} {_measured(tuned.slos, reached.ran.result)}"
    if reached.failing is not None and reached.least_failing:
        failing = f"{reached.least_failing:.3g} times the traffic"
        text += f"; with {failing} {_measured(tuned.slos, reached.failing.result)}"
    yield text + "."
    if reached.unknown:
        yield f"More may be sustained: {reached.unknown}."


def gain_lines(gains: Sequence[Gain], binds: str | None, measure: str) -> Iterator[str]:
    """What binds, by what half as much again of each limit brings, and what more would buy."""
    if binds is None:
        return
    yield f"What binds it: {binds}. Half as much again of each limit carries more {measure}:"
    for kind in ("limit", "purchase"):
        if kind == "purchase":
            yield f"What more would buy, in {measure}:"
        own = [gain for gain in gains if gain.change.kind == kind]
        for gain in sorted(own, key=lambda g: -(g.gain if g.gain is not None else -1e9)):
            yield f"  {gain.change.name:<30} {_gain_text(gain)}"


def _gain_text(gain: Gain) -> str:
    if gain.gain is None:
        return f"not possible ({gain.reason})"
    if gain.reason:
        return f"{gain.gain:+.0%} or more"
    return f"{gain.gain:+.0%}" if gain.gain < MUCH - 1.0 else f"more than {MUCH:g} times"


def _by_speed(tuned: Tuned, best: Candidate) -> str:
    """How the answer hangs on the GPU's profile."""
    profile = (best.ran.result or {})["profile"] if best.ran is not None else {}
    ends = [f"{end:.3g}" if end is not None else "none meets them" for end in (tuned.low, tuned.high)]
    percent = f"{tuned.speed_error * 100:.0f} %"
    return (
        f"On a GPU {percent} slower than {profile['name']} ({profile['status']}) says {ends[0]}, {percent} faster "
        f"{ends[1]} ({UNITS[tuned.goal]})."
    )


def _over_draws(tuned: Tuned, best: Candidate) -> str:
    """What like traffic would say, in words."""
    count = len(best.values)
    if count == 1:
        why = tuned.alone or "more were not to be had"
        return f"one draw of the traffic was tried ({why}), so no interval is known"
    of_draws = f"of like traffic with {100 * CONFIDENCE:.0f} %, by {count} draws"
    if tuned.goal == "goodput":
        low, high = best.interval
        return f"{low:.3g} to {high:.3g} requests/s {of_draws}"
    low, high = _load_ends(best)
    return f"{low:.3g} to {high:.3g} times the traffic {of_draws}"


def write(folder: Path, tuned: Tuned) -> None:
    """Write `tune.txt`, `tune.json`, `candidates.csv` and `tune.png`."""
    table, best = candidates_table(tuned), tuned.best
    has_load = best is not None and tuned.goal == "load"
    data = {
        "goal": tuned.goal,
        "slos": [str(slo) for slo in tuned.slos],
        "best": best.point if best else None,
        "value": best.value if best else None,
        "unit": UNITS[tuned.goal],
        "range": [tuned.low, tuned.high],
        "draws": len(best.values) if best else 1,
        "interval": list(_ends(best)) if best else None,
        "load_held": _load(best) if best and has_load else None,
        "load_interval": list(_load_ends(best)) if best and has_load and len(best.values) > 1 else None,
        "binds": tuned.binds,
        "limits_raised_by": MORE,
        "gains": {gain.change.name: gain.gain for gain in tuned.gains},
    }
    texts = {
        "tune.txt": "\n".join(lines(tuned)).encode() + b"\n",
        "tune.json": msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n",
        "candidates.csv": table.to_csv(index=False).encode(),
    }
    with told_where(folder, "the runs are kept: make room and give the same command again"):
        for name, text in texts.items():
            write_atomically(folder / name, text)
        save_figure(folder / "tune.png", draw(tuned))


def draw(tuned: Tuned) -> Figure:
    """Candidates by what they reach, their TTFT and TPOT with the Pareto front, and what raising each limit brings."""
    known = [c for c in tuned.candidates if c.value is not None][:MOST_BARS]
    names = [
        fill(f"{place}. {name}", 36, break_on_hyphens=False)
        for place, name in enumerate(short_names(tuned)[: len(known)], 1)
    ]
    figure = new_figure(15.0, max(4.6, 1.4 + 0.19 * sum(name.count("\n") + 1 for name in names)))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1.0, 1.2))
    drawn = [c.known for c in known]
    _bars(left, names, [c.value or 0.0 for c in known], spans=[(min(values), max(values)) for values in drawn])
    dress(left, UNITS[tuned.goal] + (", and the draws' least and most" if max(map(len, drawn), default=1) > 1 else ""))
    set_title(left, "What each reaches")
    _front(middle, candidates_table(tuned))
    gains = [gain for gain in tuned.gains if gain.gain is not None]
    gains.sort(key=lambda gain: (gain.change.kind, -(gain.gain or 0.0)))
    names = [f"{g.change.name} x {MORE:g}" if g.change.kind == "limit" else g.change.name for g in gains]
    limits = sum(gain.change.kind == "limit" for gain in gains)
    _bars(right, names, [100.0 * (gain.gain or 0.0) for gain in gains], limits)
    right.axvline(100.0 * BINDS, color=FAINT, lw=0.8, ls=":")
    kinds = (("a limit raised", 0),) * (limits > 0) + (("more to buy", 1),) * (limits < len(gains))
    swatches: list[Artist] = [Patch(color=policy_colour(place), label=kind) for kind, place in kinds]
    swatches.append(Line2D([], [], color=FAINT, lw=0.8, ls=":", label=f"binds from {BINDS:.0%}"))
    right.legend(handles=swatches, fontsize=8.5, frameon=False, loc="lower right")
    dress(right, "more load, %" if tuned.goal != "goodput" else "more goodput, %")
    set_title(right, f"What binds it: {tuned.binds}" if tuned.binds else "Nothing meets the SLOs", 44)
    return figure


def _bars(
    ax: Axes,
    names: Sequence[str],
    values: Sequence[float],
    first: int | None = None,
    spans: Sequence[tuple[float, float]] = (),
) -> None:
    """Horizontal bars from the top, those after the `first` ones in another colour; `spans`: whiskers' ends."""
    colours = [policy_colour(0 if first is None or place < first else 1) for place in range(len(names))]
    errors = [[value - low for value, (low, _) in zip(values, spans, strict=True)],
              [high - value for value, (_, high) in zip(values, spans, strict=True)]] if spans else None  # fmt: skip
    bars = ax.barh(range(len(names)), values, color=colours, height=0.7, xerr=errors, ecolor=FAINT, capsize=2)
    ax.set_yticks(range(len(names)), [plain_text(name) for name in names])
    ax.invert_yaxis()
    ax.bar_label(bars, [f" {value:.3g}" for value in values], fontsize=8)
    ax.margins(x=0.15)


def _front(ax: Axes, table: Frame) -> None:
    """The candidates' points, with the numbers that their bars have."""
    dress(ax, "P99 TTFT (ms)", "P99 TPOT (ms)")
    set_title(ax, "Pareto front of TTFT, TPOT, throughput")
    if "pareto" not in table:
        return
    for front, colour in ((False, FAINT), (True, policy_colour(0))):
        own = table[table["pareto"] == front]
        ax.scatter(own[FRONT[0]], own[FRONT[1]], s=26, color=colour, label="on the front" if front else "beaten")
    _number_points(ax, table)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.legend(fontsize=8.5, frameon=False, loc="lower right")
    ax.margins(0.16)
    ax.set_ylim(bottom=0.0)


def _number_points(ax: Axes, table: Frame) -> None:
    """Each bar's number on its point's inner side; of points of like height in one text, lest they overlap."""
    known = table.assign(number=range(1, len(table) + 1))[:MOST_BARS].dropna(subset=list(FRONT[:2]))
    if known.empty:
        return
    middle = (known[FRONT[0]].min() + known[FRONT[0]].max()) / 2.0
    beside = known.groupby([(known[FRONT[0]] > middle), (known[FRONT[1]] / known[FRONT[1]].max() * 20.0).round()])
    for (right, _), group in beside:
        furthest = group.loc[group[FRONT[0]].idxmin() if right else group[FRONT[0]].idxmax()]
        ax.annotate(
            ", ".join(map(str, group["number"])),
            (furthest[FRONT[0]], group[FRONT[1]].mean()),
            (-7 if right else 7, 0),
            textcoords="offset points",
            ha="right" if right else "left",
            va="center",
            fontsize=8,
        )
