"""What `plan` says: the answer with its interval, what it hangs on, the front, and the commands that deploy it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sim.files import write_atomically
from sim.options.scenario import Outputs
from sim.options.scenario_file import write_asked
from sim.results.accuracy import SHARE
from sim.results.sections import Accuracy
from sim.run.files import carry_out
from sim.run.folders import clear, owning, renewing
from sim.study.intervals import CONFIDENCE
from sim.study.plan import Held, Planned, Size
from sim.study.points import setup_of
from sim.study.serve_commands import manifest, run_command, serve_commands
from sim.study.sweep import told_where
from sim.study.tune_report import four_digits, gain_lines

PAGE, ANSWER, MANIFEST = "plan.md", "plan.json", "kubernetes.yaml"
ANSWER_RUN = "answer"
"""Folder of the answer's own run."""
MOST_NAMED = 4
FP8 = "FP8 KV"
COSTS = {"usd_per_hour": "USD an hour", "boards_kw": "kW of boards"}
"""What a front may count in place of GPUs, and its heads."""


def lines(planned: Planned) -> Iterator[str]:
    """The answer in sentences."""
    asked, answer, best = planned.asked, planned.answer, planned.best
    wanted = " and ".join(map(str, asked.slos))
    if answer is None or best is None:
        most = max(planned.sizes, key=lambda size: size.load, default=None)
        yield f"No deployment on up to {asked.max_gpus} {' or '.join(asked.gpus)} sustains this traffic with {wanted}."
        if most is not None and most.load > 0:
            first = most.held[0].deployment if most.held else most.raced[0].deployment
            yield f"The most is {most.load:.2f} times the traffic: {first.name} ({most.num_gpus} {most.gpu})."
        yield from _refused(planned)
        return
    yield f"{_amount(planned, answer)}: {best.deployment.name}, with {wanted}."
    yield from _sureness(planned, best)
    yield from _figures(planned)
    yield from _next_to(planned, answer)
    yield from _ties(answer, best)
    yield from _families(answer, best)
    if not best.deployment.keeps_answers:
        yield "FP8 KV changes what the model computes: check the quality of its answers."
    if not planned.draws.shares_prefixes:
        yield "Prompts share no prefixes worth caching: prefix caching and offload change nothing, and are left alone."
    yield from gain_lines(planned.gains, planned.binds, "load")
    if planned.slower is not None and planned.faster is not None:
        percent = f"{planned.speed_error * 100:.0f} %"
        profile = ((planned.figures[0].result or {}) if planned.figures else {}).get("profile", {})
        yield (
            f"On a GPU {percent} slower than {profile.get('name')} ({profile.get('status')}) it sustains "
            f"{planned.slower:.2f} times the traffic, {percent} faster {planned.faster:.2f}."
        )
    yield from _refused(planned)


def _amount(planned: Planned, answer: Size) -> str:
    best, asked = answer.best, planned.asked
    if best is None:
        return ""
    gpus = f"{answer.num_gpus} {answer.gpu}"
    if asked.objective == "goodput":
        low, high = best.interval
        rate = planned.draws.rate_per_s
        return f"{rate * best.mean:.3g} requests/s ({rate * low:.3g} to {rate * high:.3g}) on {gpus}"
    fewest, most = planned.fewest, planned.most
    ends = f"{fewest} to {most if most is not None else f'more than {asked.max_gpus}'}"
    if fewest == most:
        ends = f"{fewest}"
    if asked.objective == "cost":
        price = asked.usd_per_hour[answer.gpu]
        return f"{price * answer.num_gpus:.2f} USD an hour, {gpus} ({ends})"
    if asked.objective == "energy":
        kilowatts = asked.board_w[answer.gpu] * answer.num_gpus / 1e3
        each = kilowatts / planned.draws.rate_per_s / 3.6
        return f"{kilowatts:.2f} kW of boards, at most {each:.3g} kWh a thousand requests, {gpus} ({ends})"
    return f"{gpus} ({ends})"


def _sureness(planned: Planned, best: Held) -> Iterator[str]:
    seeds, (low, high) = planned.asked.seeds, best.interval
    seen = ", ".join(f"{load:.2f}" for load in best.loads)
    text = f"It sustains {best.mean:.2f} times the traffic; over {seeds} draws {seen}"
    if seeds > 1:
        text += f", another like them within {low:.2f} to {high:.2f} ({CONFIDENCE:.0%})"
    yield f"{text}. Draws: {planned.draws.told}."
    if any(one.unknown for one in best.reached):
        reason = next(one.unknown for one in best.reached if one.unknown)
        yield f"More may be sustained: {reason}."


def _figures(planned: Planned) -> Iterator[str]:
    where = "At the load sustained" if planned.asked.objective == "goodput" else "At the traffic as it is"
    results = [ran.result for ran in planned.figures if ran.result is not None]
    told = []
    for slo in planned.asked.slos:
        values = [result[slo.metric] for result in results if result[slo.metric] is not None]
        if values:
            told.append(f"{slo.metric} {four_digits(min(values) if slo.at_least else max(values))}")
    if told:
        yield f"{where}, the worst draw: {', '.join(told)}."
        yield from error_sentences([slo.metric for slo in planned.asked.slos], results)


def error_sentences(metrics: Sequence[str], results: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """How far off these metrics may be, as results say by measured rows; the last result's words where they differ."""
    told: dict[str, str] = {}
    reasons: dict[str, None] = {}
    for result in results:
        # Runs that an earlier version left have none.
        found = msgspec.convert(result.get("accuracy", {"share": SHARE, "intervals": {}}), Accuracy)
        for name in metrics:
            if (one := found.intervals.get(name)) is not None and (value := result[name]):
                told[name] = f"{name} {one.low / value:.2f} to {one.high / value:.2f}"
        reasons |= {found.unknown: None} if found.unknown else {}
    if told:
        yield f"Measured over simulated, of {SHARE:.0%} of servers like it: {', '.join(told.values())}."
    if missing := [name for name in metrics if name not in told]:
        yield f"Error of {' and '.join(missing)}: unknown ({'; '.join(reasons) or 'too few measured rows'})."


def _next_to(planned: Planned, answer: Size) -> Iterator[str]:
    for size in planned.sizes:
        if size.gpu != answer.gpu or size.num_gpus == answer.num_gpus or size.best is None:
            continue
        low, high = size.best.interval
        yield (
            f"With {size.num_gpus} {size.gpu} {size.best.mean:.2f} times ({low:.2f} to {high:.2f}): "
            f"{size.best.deployment.name}."
        )


def _ties(answer: Size, best: Held) -> Iterator[str]:
    # Beside one that keeps answers none that does not: what FP8 KV brings stands apart.
    rivals = [one for one in answer.held if one.deployment.keeps_answers >= best.deployment.keeps_answers]
    first = max(rivals, key=lambda one: one.mean)
    tied = [one for one in rivals if one is not best and (one is first or one.ties(first))]
    if tied:
        names = "; ".join(one.deployment.name for one in tied[:MOST_NAMED])
        yield f"As good, as far as these draws tell: {names}. Of these the one that changes least is taken."


def _families(answer: Size, best: Held) -> Iterator[str]:
    """The best of what the answer is not: pools or like engines, KV of 16 bits or 8."""
    loads = {one.deployment.family: (one.deployment.name, one.load, "raced") for one in reversed(answer.raced)}
    loads |= {one.deployment.family: (one.deployment.name, one.mean, "") for one in reversed(answer.held)}
    own = best.deployment.family
    words = {
        (not own[0], own[1]): "Like engines" if own[0] else "Prefill and decode pools",
        (own[0], not own[1]): "KV in 16 bits" if own[1] else FP8,
    }
    for family, word in words.items():
        if family in loads:
            name, load, how = loads[family]
            raced = ", by the short race alone" if how else ""
            why = " It saves no GPU, and changes what the model computes." if word == FP8 else ""
            yield f"{word} instead: {load:.2f} times the traffic{raced} ({name}).{why}"


def _refused(planned: Planned) -> Iterator[str]:
    for reason, names in planned.refused.items():
        shown = "; ".join(names[:MOST_NAMED]) + (f"; and {more} more" if (more := len(names) - MOST_NAMED) > 0 else "")
        yield f"Not tried ({shown}): {reason}"


def answer_options(planned: Planned) -> dict[str, Any]:
    """The options of a run of the answer on the first draw."""
    best = planned.best
    if best is None:
        return {}
    traffic = planned.draws.options[0]
    goodput = tuple(planned.asked.fixed.get("goodput", ()))
    found = {**best.deployment.options, **traffic}
    if planned.asked.objective == "goodput":
        found["rate_scale"] = traffic.get("rate_scale", 1.0) * round(best.mean, 4)
    return found | ({"goodput": goodput} if goodput else {})


def front(planned: Planned) -> list[dict[str, Any]]:
    """A row for each size that was looked at: GPUs, deployment, load; `pareto` where no fewer GPUs carry as much.

    Where GPUs have prices, or boards their power, by these.
    """
    rate, asked = planned.draws.rate_per_s, planned.asked
    rows: list[dict[str, Any]] = []
    for size in planned.sizes:
        if not size.load > 0:
            continue
        best = size.best
        low, high = best.interval if best is not None else (None, None)
        row = {
            "gpu": size.gpu, "num_gpus": size.num_gpus, "load": size.load, "requests_per_s": rate * size.load,
            "low": low, "high": high, "tried_on_every_draw": best is not None,
            "deployment": (best or size.raced[0]).deployment.name,
        }  # fmt: skip
        if size.gpu in asked.usd_per_hour:
            row["usd_per_hour"] = asked.usd_per_hour[size.gpu] * size.num_gpus
        if size.gpu in asked.board_w:
            row["boards_kw"] = asked.board_w[size.gpu] * size.num_gpus / 1e3
        rows.append(row)
    cost = next((name for name in COSTS if rows and name in rows[0]), "num_gpus")
    for row in rows:
        row["pareto"] = not any(
            other[cost] <= row[cost] and other["load"] >= row["load"] and other is not row for other in rows
        )
    return rows


def front_lines(planned: Planned) -> Iterator[str]:
    """The front as a Markdown table."""
    rows = front(planned)
    if not rows:
        return
    costs = [name for name in COSTS if name in rows[0]]
    numbers = [*(COSTS[name] for name in costs), "requests/s", "times the traffic", "of like traffic (95 %)"]
    yield f"| GPUs | {' | '.join(numbers)} | deployment |"
    yield f"|{'--:|' * (1 + len(numbers))}---|"
    for row in rows:
        interval = f"{row['low']:.2f} to {row['high']:.2f}" if row["low"] is not None else "raced only"
        cells = [f"{row['num_gpus']} {row['gpu']}", *(f"{row[name]:.2f}" for name in costs)]
        cells += [f"{row['requests_per_s']:.3g}", f"{row['load']:.2f}", interval]
        yield f"| {' | '.join(cells)} | {row['deployment']}{'' if row['pareto'] else ' (beaten)'} |"


def commands(planned: Planned, folder: Path) -> Iterator[str]:
    """What starts the answer, and what simulates it."""
    if planned.best is None:
        return
    yield from serve_commands(planned.best.deployment.options)
    yield run_command(answer_options(planned), str(folder / ANSWER_RUN))


def _paragraphs(told: Iterable[str]) -> Iterator[str]:
    """Sentences as Markdown: a paragraph each, and what is set in as a list."""
    in_list = False
    for line in told:
        is_item = line.startswith("  ")
        if not (is_item and in_list):
            yield ""
        yield f"- {' '.join(line.split())}" if is_item else line
        in_list = is_item


def write(folder: Path, planned: Planned) -> None:
    """Write `plan.md`, `plan.json` and `kubernetes.yaml`; the manifest of an earlier answer goes."""
    best = planned.best
    text = ["# Plan", *_paragraphs(lines(planned)), "", *front_lines(planned)]
    if best is not None:
        text += ["", "```", *commands(planned, folder), "```"]
    data = {
        "objective": planned.asked.objective,
        "slos": [str(slo) for slo in planned.asked.slos],
        "gpu": planned.answer.gpu if planned.answer else None,
        "num_gpus": planned.answer.num_gpus if planned.answer else None,
        "num_gpus_interval": [planned.fewest, planned.most],
        "deployment": best.deployment.options if best else None,
        "load": best.mean if best else None,
        "load_interval": list(best.interval) if best else None,
        "load_by_draw": list(best.loads) if best else None,
        "requests_per_s": planned.draws.rate_per_s,
        "binds": planned.binds,
        "gains": {gain.change.name: gain.gain for gain in planned.gains},
        "front": front(planned),
        "refused": planned.refused,
        "run": answer_options(planned),
    }
    files = {
        PAGE: "\n".join(text).encode() + b"\n",
        ANSWER: msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n",
    }
    yaml = manifest(best.deployment.options) if best is not None else None
    if yaml is not None:
        files[MANIFEST] = yaml.encode()
    with told_where(folder, "the runs are kept: make room and give the same command again"):
        (folder / MANIFEST).unlink(missing_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)


def simulate_answer(folder: Path, planned: Planned) -> None:
    """Leave a run of the answer on the first draw in a folder of its own, for `kvtwin report`; none without any."""
    options, place = answer_options(planned), folder / ANSWER_RUN
    if not options:
        if place.is_dir():
            with owning(place):
                clear(place)
        return
    setup = setup_of(options)
    with renewing(place) as new:
        _, result = carry_out(setup.scenario, setup.label, setup.policy, new.place, Outputs(quiet=True), series=True)
        write_asked(new.place, options)
        new.whole = result.complete
