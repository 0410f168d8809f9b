"""What differs between two policies, in words: sentences that say what the numbers of their results prove.

TTFT is queueing plus prefill by definition, so its causes can be named; what only goes together is told so.
"""

from collections.abc import Iterable, Iterator, Sequence

from sim.results.load import mean_decoding
from sim.results.report import METRICS, NONE, labels, number, overload_sentences, queue_share, ratio
from sim.results.schema import OVER_DRAWS, Bounds, Result, Spread

SAME = 0.01
"""Relative differences up to this are called the same in sentences."""
WITHOUT_ENGINE = "prices without an engine"


def sentences(results: Sequence[Result]) -> list[str]:
    """What the numbers say of each policy beside the first, a paragraph each."""
    names = labels(results)
    others = zip(results[1:], names[1:], strict=True)
    return [" ".join(_differences(results[0], other, names[0], name)) for other, name in others]


def all_sentences(results: Sequence[Result], bounds: Bounds | None) -> list[str]:
    """All that is said of a comparison: its engines first, then the load, the policies, and what bounds them."""
    bounds = bounds or Bounds()
    told = (engine_sentences(results), overload_sentences(results), sentences(results))
    told += (draw_sentences(results, bounds), bound_sentences(bounds))
    return [sentence for part in told for sentence in part]


def engine_sentences(results: Sequence[Result]) -> list[str]:
    """On which engine the policies ran; where there are several, that differences are the engines' as well."""
    used = [profile.name if (profile := result.engine_profile) else "" for result in results]
    names = labels(results)
    if told := engines_differ(zip(names, used, strict=True)):
        return [told]
    return [f"All on the engine {used[0] or WITHOUT_ENGINE}."] if len(set(names)) > 1 else []


def engines_differ(runs: Iterable[tuple[str, str]]) -> str | None:
    """What is to be said first of runs, (label, engine profile's name, "" for none), on several engines; else None."""
    used: dict[str, dict[str, None]] = {}
    for label, engine in runs:
        used.setdefault(engine or WITHOUT_ENGINE, {})[label] = None
    if len(used) < 2:
        return None
    each = "; ".join(f"{' and '.join(own)} on {name}" for name, own in used.items())
    return f"The engines differ ({each}), so differences are theirs as well as the policies'."


def draw_sentences(results: Sequence[Result], bounds: Bounds) -> list[str]:
    """What differs from the first policy over draws of the traffic, and what no more than chance, or than `SAME`."""
    found = []
    for label, spreads in bounds.over_draws.items():
        told = [(f"{OVER_DRAWS[name]} {_spread(spread)}", _differs(spread)) for name, spread in spreads.items()]
        sure, like = (", ".join(text for text, differs in told if differs is which) for which in (True, False))
        parts = [part for part in (sure, like and f"no more than chance or 1 %: {like}") if part]
        head = f"Over {bounds.draws} draws of the traffic, {label} beside {labels(results)[0]}"
        found.append(f"{head} (mean ratio, 95 % interval): {'; '.join(parts)}.")
    return found


def _differs(spread: Spread) -> bool:
    return not spread.low <= 1.0 <= spread.high and abs(spread.ratio - 1.0) > SAME


def _spread(spread: Spread) -> str:
    low, high = factor_text(spread.low).removesuffix("x"), factor_text(spread.high).removesuffix("x")
    return f"{factor_text(spread.ratio)} ({low} to {high})"


def bound_sentences(bounds: Bounds) -> list[str]:
    """How much of the reachable goodput each policy reaches, and what it would reach with a limit lifted."""
    found = []
    if bounds.goodput_bound is not None:
        shares = [f"{label} reaches {_percent(share)}" for label, share in bounds.bound_shares.items()]
        bound = f"No scheduler could exceed a goodput of {bounds.goodput_bound:.3g} requests/s here"
        found.append(f"{bound}: {', '.join(shares)} of what any could reach." if shares else f"{bound}.")
    for label, lifted in bounds.lifted.items():
        found += [f"{label} with {name} instead: {_lifted(metrics)}." for name, metrics in lifted.items()]
    return found


def _lifted(metrics: dict[str, float | None]) -> str:
    text = f"mean TTFT {_time(metrics['mean_ttft_ms'])}, mean TPOT {_time(metrics['mean_tpot_ms'])}"
    goodput = metrics["request_goodput"]
    return text if goodput is None else f"{text}, goodput {goodput:.3g} requests/s"


def _differences(base: Result, other: Result, a: str, b: str) -> Iterator[str]:
    for result, name in ((base, a), (other, b)):
        if not result.complete:
            yield f"{name} ended early, so its figures cover only the requests that ended."
    counts = base.completed, other.completed
    if counts[0] != counts[1]:
        yield f"{a} completes {counts[0]} requests and {b} {counts[1]}, so their means are over different requests."
    if not counts[0] or not counts[1]:
        if counts[0] == counts[1]:
            yield f"Neither {a} nor {b} completes a request."
        return
    keys = [metric.key for metric in METRICS if metric.key.endswith("_ms") and hasattr(base, metric.key)]
    keys += ["output_throughput", "request_goodput"]
    if all(_same(number(base, key), number(other, key)) for key in keys):
        yield f"{b} and {a} do not differ: every latency, queueing and throughput is the same within {SAME * 100:g} %."
        return
    for sentence in (_ttft, _tpot, _overall):
        yield from sentence(base, other, a, b)


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(b - a) <= SAME * abs(a))


def _verb(a: float, b: float) -> str:
    return "falls" if b < a else "rises"


def _ttft(base: Result, other: Result, a: str, b: str) -> Iterator[str]:
    first, second = base.mean_ttft_ms, other.mean_ttft_ms
    if first is None or second is None:
        return
    text = f"With {b} instead of {a}, mean TTFT {_change(first, second)}"
    wait, other_wait = base.mean_queue_ms, other.mean_queue_ms
    if wait is not None and other_wait is not None and not _same(first, second):
        prefill = (second - other_wait) - (first - wait)
        text += (
            f": requests wait {_time(other_wait)} in the queue on average ({_percent(queue_share(other))} of TTFT) "
            f"instead of {_time(wait)} ({_percent(queue_share(base))}). "
            f"Queueing {_by(other_wait - wait)}, prefill {_by(prefill)}"
        )
    yield text + "."
    yield from _tail("TTFT", base, other)


def _change(first_ms: float, second_ms: float) -> str:
    """`falls from 32.2 s to 157 ms (0.0049x)`, or that it stays."""
    if _same(first_ms, second_ms):
        return f"is the same within {SAME * 100:g} % ({_time(second_ms)}, was {_time(first_ms)})"
    factor = ratio(second_ms, first_ms)
    told = "" if factor is None else f" ({factor_text(factor)})"
    return f"{_verb(first_ms, second_ms)} from {_time(first_ms)} to {_time(second_ms)}{told}"


def _by(change_ms: float) -> str:
    return f"{_verb(0.0, change_ms)} by {_time(abs(change_ms))}" if change_ms else "stays"


def _tpot(base: Result, other: Result, a: str, b: str) -> Iterator[str]:
    first, second = base.mean_tpot_ms, other.mean_tpot_ms
    if first is None or second is None:
        return
    text = f"Mean TPOT {_change(first, second)}"
    past, other_past = mean_decoding(base), mean_decoding(other)
    if past is not None and other_past is not None and not _same(first, second) and not _same(past, other_past):
        text += f", with {other_past:.3g} instead of {past:.3g} requests past their first token at a time"
    yield text + "."
    yield from _tail("TPOT", base, other)
    parked = other.counters.policy.get("parked", 0)
    if parked:
        again = "once" if parked == 1 else f"{parked:,.0f} times"
        yield f"After a prefill a request had to wait for room for all its layers on the GPU {again}, part of its TPOT."
    if base.num_preemptions != other.num_preemptions:
        yield f"Preemptions: {other.num_preemptions:,} instead of {base.num_preemptions:,}."


def _tail(name: str, base: Result, other: Result) -> Iterator[str]:
    """A P99 that does not follow the mean deserves to be said."""
    mean, other_mean = (number(result, f"mean_{name.lower()}_ms") for result in (base, other))
    tail, other_tail = (number(result, f"p99_{name.lower()}_ms") for result in (base, other))
    if mean is None or other_mean is None or tail is None or other_tail is None or _same(tail, other_tail):
        return
    if _same(mean, other_mean) or _verb(mean, other_mean) != _verb(tail, other_tail):
        yield f"But P99 {name} {_change(tail, other_tail)}."


def _overall(base: Result, other: Result, a: str, b: str) -> Iterator[str]:
    first, second = base.mean_e2el_ms, other.mean_e2el_ms
    if first is not None and second is not None and not _same(first, second):
        yield f"End to end a request takes {_time(second)} instead of {_time(first)} on average."
    first, second = base.output_throughput, other.output_throughput
    if first and second and not _same(first, second):
        yield f"Output throughput {_verb(first, second)} from {first:,.0f} to {second:,.0f} tokens/s."
    first, second = base.goodput_attainment, other.goodput_attainment
    if first is not None and second is not None:
        was = "as before" if _percent(first) == _percent(second) else f"instead of {_percent(first)}"
        yield f"The SLOs are met by {_percent(second)} of the requests, {was}."


def _time(milliseconds: float | None) -> str:
    """A time with three digits, ms below 1 s."""
    if milliseconds is None:
        return NONE
    if milliseconds < 999.5:
        return f"{milliseconds:.3g} ms"
    return f"{milliseconds / 1e3:.3g} s" if milliseconds < 999_500 else f"{milliseconds / 1e3:,.0f} s"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share * 100:.3g} %"


def factor_text(factor: float) -> str:
    """A ratio as printed: `0.25x`, more digits where it is small, none where it is large."""
    if factor >= 100.0:
        return f"{factor:,.0f}x"
    return f"{factor:.2f}x" if factor >= 0.095 else f"{factor:.2g}x"
