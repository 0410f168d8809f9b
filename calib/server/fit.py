"""From a server's run to a `Profile`: what the run tells is fitted, the rest carried over from the base profile."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import msgspec
import numpy as np

from calib.robust import Array, Estimate, Fit, Parameter, fit_relative
from calib.server.constants import (
    ATTENTION_RATE,
    FRONT_END,
    KV_RATE,
    OF_FRONT_END,
    PER_TOKEN,
    SPAN,
    chosen_constants,
    constants_of,
    is_told,
    of_model,
    parameters_of,
    with_constants,
)
from calib.server.front_end import FrontEnd, find_front_end
from calib.server.iterations import predict_steps_s, replay
from calib.server.requests import fit_requests
from sim.cost.engine_profile import shipped_engines
from sim.cost.profile import Constant, Profile
from sim.errors import UserError
from sim.run.prepare import Setup
from sim.run.served import mean_errors, measured_times, simulated_times
from traces.served import ServedRun

FitWith = Callable[[Setup, ServedRun, int, Mapping[str, Parameter]], Fit]
"""Fits constants to the measured times of the first so many requests of a run."""
FrontEndOf = Callable[[int, Sequence[str]], FrontEnd]
"""The front end told by the first so many requests, of these constants of it."""

LEAST_REQUESTS = 20
MOST_STEPS = 4000
"""Steps that a fit looks at, taken evenly from all."""
LEAST_MATCHED = 0.5
"""Share of steps whose tokens must agree about their end, if steps are to be fitted."""
LEAST_WEIGHT = 0.02
"""Relative change of iterations (root mean square) that a constant of twice the size must make to be fitted."""
LEAST_LEFT = 0.1
"""Share of its price that an iteration takes at least, however the front end is moved."""
LEAST_PAUSES = 10
"""Iterations after a pause from which on their durations tell the front end's time."""
UNIFORM = 12**0.5
"""Width of an interval over the standard deviation of a value that is anywhere in it."""
REMEDY = "run `vllm bench serve` at a --request-rate between idle and saturated, with prompts of many lengths"


@dataclass(frozen=True)
class ServerFit:
    """A profile fitted to a run, and how well it does.

    Attributes:
        method: what it was fitted to, in words.
        estimates: of the constants fitted.
        untold: constants that were to be fitted and that the run does not tell.
        held_out: errors of the means of the second half of the requests, from the first half's constants.
        whole: errors of the means of all requests, from the profile's constants.
        notes: what the user should know.
    """

    profile: Profile
    method: str
    estimates: dict[str, Estimate]
    untold: list[str]
    held_out: dict[str, float]
    whole: dict[str, float]
    notes: list[str]


def fit_server(setup: Setup, served: ServedRun, *, name: str, constants: Sequence[str] | None = None) -> ServerFit:
    """Fit constants of the set-up's profile to a run.

    To its iterations where the client saw every token, else to the TTFT and TPOT of its requests.

    Args:
        setup: the engine as the server had it, on the profile to start from.
        name: of the new profile.
        constants: which to fit; by default those of `FITTED`, less what the run does not tell.

    Raises:
        UserError: a run too short, or one that does not tell the constants named, or none at all.
    """
    count = len(served.requests)
    if count < LEAST_REQUESTS:
        raise UserError(f"{served.path}: {count} requests are too few to fit: run `vllm bench serve` with more prompts")
    cached = setup.limits.enable_prefix_caching and any(request.hash_ids for request in served.requests)
    names = chosen_constants(setup, constants, cached=cached)

    @cache
    def front_end_of(known: int, own: tuple[str, ...]) -> FrontEnd:
        return find_front_end(setup, served, known, own)

    fit_with, method, notes = _way(setup, served, names, front_end_of)
    if constants is None and fit_with is fit_requests:
        # Attention over prompts hides in TTFT behind everything else: it takes iterations to see it.
        names = names[:3] + [name for name in names[3:] if name in OF_FRONT_END]
    fit, untold, together = _fit_told(setup, served, names, fit_with, is_asked=constants is not None)
    kv_rate = of_model(setup, KV_RATE)
    if constants is None and ATTENTION_RATE in untold and kv_rate in constants_of(setup):
        # Then iterations may tell KV's rate from the weights', which it follows unless they say otherwise.
        others = [kv_rate if constant == ATTENTION_RATE else constant for constant in names]
        richer, still_untold, still_together = _fit_told(setup, served, others, fit_with, is_asked=False)
        # Not where it costs another constant, or where chance explains as much.
        if {*still_untold} <= {*untold} and kv_rate not in still_together and richer.explains_more_than(fit):
            names, fit, untold, together = others, richer, [*still_untold, ATTENTION_RATE], still_together
    kept = [constant for constant in names if constant not in untold]
    held_out = _held_out(setup, served, kept, fit_with)
    profile = _profile(setup, served, fit, name, method, held_out, together)
    whole = mean_errors(simulated_times(with_constants(setup, fit.values), served), measured_times(served))
    notes += _at_limits(setup, fit)
    if together:
        notes.append(f"the run tells {' and '.join(together)} together only: with them trust loads like this one")
    if untold:
        notes.append(f"the run does not tell {', '.join(untold)}: carried over from the base profile")
    return ServerFit(profile, method, fit.estimates, untold, held_out, whole, notes)


def _at_limits(setup: Setup, fit: Fit) -> Iterator[str]:
    """Of each constant that stands at a limit, but for overheads of nothing."""
    for name, parameter in parameters_of(setup, [*fit.estimates]).items():
        estimate = fit.estimates[name]
        is_most = parameter.most - estimate.value < estimate.value - parameter.least
        if estimate.at_limit and (is_most or parameter.least):
            most = f"most (the GPU's peak or {SPAN:g} times the base profile's)"
            limit = most if is_most else f"least (1/{SPAN:g} of the base profile's)"
            yield (
                f"{name} stands at {estimate.value:.4g}, the {limit} that is looked for: "
                "it makes up for what the profile's form does not say"
            )


def _way(
    setup: Setup, served: ServedRun, names: Sequence[str], front_end_of: FrontEndOf
) -> tuple[FitWith, str, list[str]]:
    """How to fit the run, that in words, and why not better."""
    requests = f"TTFT and TPOT of {len(served.requests)} requests"
    if not served.has_token_times:
        note = "the file does not say when each token came: fitted to requests, not iterations"
        return fit_requests, requests, [note]
    own, count = _of_front_end(names), len(served.requests)
    found = replay(with_constants(setup, front_end_of(count, own).values) if own else setup, served, count)
    if found.matched < LEAST_MATCHED:
        given = "" if own else f", its front end takes another time ({FRONT_END})"
        note = (
            f"tokens agree about the end of {found.matched:.0%} of the iterations only: the server schedules otherwise "
            f"than {setup.label} with these limits{given}, or streams in bursts; fitted to requests, not iterations"
        )
        return fit_requests, requests, [note]
    method = f"{len(found.steps)} iterations, {found.matched:.0%} of those seen"
    return partial(_fit_steps, front_end_of), method, []


def _of_front_end(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in OF_FRONT_END if name in names)


def _fit_steps(
    front_end_of: FrontEndOf, setup: Setup, served: ServedRun, known: int, parameters: Mapping[str, Parameter]
) -> Fit:
    """Constants that hardly show in any iteration are left out of the estimates.

    The front end's are those with which tokens agree about iterations, as close as those after a pause tell them.
    """
    own = _of_front_end(parameters)
    front_end = front_end_of(known, own) if own else FrontEnd({}, {}, 1.0)
    there = with_constants(setup, front_end.values)
    steps = replay(there, served, known).steps
    steps = steps[:: -(-len(steps) // MOST_STEPS)]
    if not steps:
        raise UserError(f"{served.path}: no iteration whose tokens agree about its end; {REMEDY}")
    after_pause = np.array([step.before is None for step in steps])
    first = [step.plans[0].chunks for step in steps]
    prompts = after_pause * np.array([float(chunks[0].seq.num_tokens) if chunks else 0.0 for chunks in first])

    def predicted(values: Mapping[str, float]) -> Array:
        # An iteration after a pause begins once its request has passed the front end.
        more = {name: value - front_end.values[name] for name, value in values.items() if name in own}
        later_s = more.get(FRONT_END, 0.0) * after_pause + more.get(PER_TOKEN, 0.0) * prompts
        priced_s = predict_steps_s(with_constants(there, values).cost, steps)
        return np.maximum(priced_s + later_s, LEAST_LEFT * priced_s)

    start = predicted({})

    def weight(name: str) -> float:
        doubled = predicted({name: 2 * (constants_of(setup)[name].value or parameters[name].start)})
        return float(np.sqrt(np.mean(np.log(doubled / start) ** 2)))

    shown = {
        name: parameter for name, parameter in parameters.items() if name not in own and weight(name) >= LEAST_WEIGHT
    }
    if not shown:
        raise _untold_error(served, [name for name in parameters if name not in own])
    within: dict[str, Parameter] = {}
    for name, (least, most) in front_end.limits.items():
        within[name] = Parameter(front_end.values[name] or (least + most) / 2, least, most, log=False)
    fit = fit_relative(predicted, np.array([step.seconds for step in steps]), shown | within)
    inside = all(
        limits.least < fit.estimates[name].low <= fit.estimates[name].high < limits.most
        for name, limits in within.items()
    )
    if not inside or after_pause.sum() < LEAST_PAUSES:
        # Durations tell the front end less well than what was scheduled when.
        for name, limits in within.items():
            stderr = (limits.most - limits.least) / UNIFORM
            fit.estimates[name] = Estimate(front_end.values[name], stderr, limits.least, limits.most)
    return fit


def _fit_told(
    setup: Setup, served: ServedRun, names: Sequence[str], fit_with: FitWith, *, is_asked: bool
) -> tuple[Fit, list[str], list[str]]:
    """The fit of those constants that the run tells, the names of those it does not, and of those it tells together.

    One that is open is carried over. Several are open where one makes up for the other: together they predict what
    the run had, and one from elsewhere beside the other fitted would not.
    """
    left, untold = list(names), []
    while True:
        parameters = parameters_of(setup, left)
        fit = fit_with(setup, served, len(served.requests), parameters)
        hidden = [name for name in left if name not in fit.estimates]
        open_ended = [
            name for name in left if name not in hidden and not is_told(fit.estimates[name], parameters[name])
        ]
        lacking = hidden + open_ended
        if lacking and (is_asked or len(left) == 1):
            raise _untold_error(served, lacking)
        if 1 < len(open_ended) == len(left):
            # Nothing is told: one has to be taken on trust, and the overhead is listed first.
            lacking = open_ended[:1]
        elif len(open_ended) != 1:
            return fit, untold + hidden, open_ended
        left = [name for name in left if name not in lacking]
        untold += lacking


def _untold_error(served: ServedRun, names: Sequence[str]) -> UserError:
    return UserError(
        f"{served.path}: does not tell {', '.join(names)} ({_load(served)}): {REMEDY}, or name others with --constants"
    )


def _load(served: ServedRun) -> str:
    """How busy the server was, in words."""
    spans = [(r.arrival_s, r.arrival_s + e2el) for r, e2el in zip(served.requests, served.e2el_s, strict=True)]
    in_flight = [sum(start <= at < end for start, end in spans) for at, _ in spans]
    return f"{min(in_flight)} to {max(in_flight)} requests in flight"


def _held_out(setup: Setup, served: ServedRun, names: Sequence[str], fit_with: FitWith) -> dict[str, float]:
    """Errors on the second half of the requests, from constants fitted to the first half's times alone."""
    half = len(served.requests) // 2
    fit = fit_with(setup, served, half, parameters_of(setup, names))
    rest = slice(half, None)
    return mean_errors(simulated_times(with_constants(setup, fit.values), served)[rest], measured_times(served)[rest])


def _profile(
    setup: Setup,
    served: ServedRun,
    fit: Fit,
    name: str,
    method: str,
    held_out: Mapping[str, float],
    together: Sequence[str],
) -> Profile:
    base = setup.profile
    constants = {}
    for key, old in with_constants(setup, fit.values).profile.constants.items():
        estimate = fit.estimates.get(key)
        if estimate is None:
            carried = (
                old.source if old.source.startswith("carried over") else f"carried over from {base.name}: {old.source}"
            )
            constants[key] = msgspec.structs.replace(old, source=carried)
        elif key in together:
            others = " and ".join(other for other in together if other != key)
            constants[key] = Constant(estimate.value, None, old.unit, f"fitted to a server: told with {others} only")
        elif estimate.at_limit:
            constants[key] = Constant(
                estimate.value, None, old.unit, "fitted to a server: at the limit of what it may be"
            )
        else:
            interval = f"95 % interval {estimate.low:.6g} to {estimate.high:.6g}"
            constants[key] = Constant(estimate.value, estimate.stderr, old.unit, f"fitted to a server: {interval}")
    provenance = {
        "run": served.path.name,
        "run_sha256": sha256_of(served.path),
        "model": f"{setup.model.name}, {setup.tp} GPU{'s' * (setup.tp > 1)}",
        "engine": f"{setup.label}, {engine_text(setup)}",
        "fitted": f"{', '.join(fit.estimates)} to {method}; points scatter by {100 * fit.scatter:.1f} %",
        "held_out": "second half of the requests from the first half's constants: " + errors_text(held_out),
        "base": f"{base.name}, for what the run does not tell",
        "caution": "of this server and model: the constants hold what the form does not say of them",
    }
    trace = setup.scenario.trace
    if trace is not None and Path(trace) != served.path:
        provenance |= {"trace": Path(trace).name, "trace_sha256": sha256_of(Path(trace))}
    engine = setup.engine_profile
    if engine is not None and engine.name not in shipped_engines():
        provenance["engine_profile"] = f"{engine.name}, a file: give it as --engine-profile with this profile"
    residuals = {f"unseen_requests_{key}": round(abs(error), 5) for key, error in held_out.items()}
    return Profile(
        name=name,
        gpu=setup.hardware.name,
        status="measured-from-server",
        form=base.form,
        constants=constants,
        provenance=provenance,
        residuals=residuals,
        all_reduce=base.all_reduce,
        linear_factors=base.linear_factors,
        fp8_linear_factors=base.fp8_linear_factors,
        nvfp4_linear_factors=base.nvfp4_linear_factors,
        engine_profile=engine.name if engine is not None and engine.name in shipped_engines() else None,
    )


def engine_text(setup: Setup) -> str:
    """How the engine schedules and its limits, in words."""
    limits = setup.limits
    cached = ", prefixes cached" if limits.enable_prefix_caching else ""
    return (
        f"{setup.policy.scheduling}, {limits.num_gpu_blocks} blocks of {limits.block_size}, "
        f"max_num_seqs {limits.max_num_seqs}, max_num_batched_tokens {limits.max_num_batched_tokens}{cached}"
    )


def errors_text(errors: Mapping[str, float]) -> str:
    """Errors of means in words."""
    return ", ".join(f"mean {name.upper()} {100 * error:+.1f} %" for name, error in errors.items())


def sha256_of(path: Path) -> str:
    """Of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
