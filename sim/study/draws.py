"""The traffics that `plan` and `tune` try: a workload under several seeds, or a trace and resamples of it."""

import hashlib
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from sim.errors import UserError
from sim.options.scenario import OF_WORKLOADS, READING, SHAPING, build_scenario
from sim.run.traffic import WORTH_SAYING, shared_prefix_share, traffic
from traces.errors import TraceError
from traces.request import Request
from traces.resample import resample
from traces.writers import write_trace

TRAFFIC = ("trace", "trace_format", *READING, *SHAPING, *OF_WORKLOADS, "seed")
"""Options of the traffic."""
USUAL_DRAWS = 5
MOST_REQUESTS = 20_000
"""Of a draw."""
LEAST_S = 300.0
"""A trace whose arrivals last less is resampled until they last so long."""
USUAL_S = 600.0
"""Of generated traffic whose number of requests is not said."""
BLOCKS = 20
LEAST_BLOCK_S = 60.0
PROBED = 2000


class Draws(Struct, frozen=True):
    """Like traffics, told apart by their numbers; 0 is the traffic as it is, where it is neither short nor long.

    Attributes:
        options: of the traffic of each number.
        num_requests: of each.
        rate_per_s: of the traffic as it is, requests/s.
        sharing: share of the prompt tokens that stand in earlier prompts or answers.
        told: what the draws are, in words.
    """

    options: tuple[dict[str, Any], ...]
    num_requests: int
    rate_per_s: float
    sharing: float
    told: str

    def head(self, number: int, span_s: float, load: float) -> dict[str, Any]:
        """The first `span_s` seconds of a traffic at `load` times its rate, in options; at least `PROBED` / 10."""
        count = max(PROBED // 10, round(self.rate_per_s * load * span_s))
        return {**self.options[number], "num_prompts": min(count, self.num_requests)}

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts begin alike, to an extent that is worth saying."""
        return self.sharing > WORTH_SAYING


def draws(given: dict[str, Any], count: int, folder: Path) -> Draws:
    """`count` traffics like the one that options describe; resamples of a trace are written into `folder`.

    Raises:
        UserError: there is none, it cannot be read, comes all at once, or waits for answers.
    """
    own = {name: value for name, value in given.items() if name in TRAFFIC}
    for name in ("max_concurrency", "closed_sessions"):
        if own.get(name):
            raise UserError(
                f"--{name.replace('_', '-')}: plan raises the rate of arrivals, and here requests wait for answers; "
                "leave it out"
            )
    scale = own.pop("rate_scale", 1.0)
    try:
        return (_generated if own.get("trace") is None else _resampled)(own, scale, count, folder)
    except TraceError as error:
        raise UserError(str(error)) from error


def _generated(own: dict[str, Any], scale: float, count: int, _: Path) -> Draws:
    seed = own.get("seed", 0)
    probe = list(traffic(build_scenario({**own, "num_prompts": own.get("num_prompts", PROBED)})))
    rate_per_s = _rate(probe)
    number = own.get("num_prompts") or min(max(round(USUAL_S * rate_per_s * scale), 1000), MOST_REQUESTS)
    own |= {"num_prompts": number, "rate_scale": scale}
    options = tuple({**own, "seed": seed + place} for place in range(count))
    told = f"{number:,} requests of {own['workload']} under each seed"
    return Draws(options, number, rate_per_s * scale, shared_prefix_share(probe), told)


def _resampled(own: dict[str, Any], scale: float, count: int, folder: Path) -> Draws:
    seed = own.get("seed", 0)
    first = list(traffic(build_scenario(own)))
    rate_per_s = _rate(first)
    span_s = len(first) / rate_per_s
    number = min(max(len(first), round(LEAST_S * rate_per_s * scale)), MOST_REQUESTS)
    block_s = _block_s(span_s)
    options: list[dict[str, Any]] = []
    for place in range(count):
        if place == 0 and number == len(first):
            options.append({**own, "rate_scale": scale})
            continue
        requests = first
        if own.get("request_rate") is not None:
            requests = list(traffic(build_scenario({**own, "seed": seed + place})))
        path = folder / f"traffic-{place}.csv"
        write_trace(islice(resample(requests, block_s, seed + place), number), path)
        options.append({"trace": str(path), "rate_scale": scale})
    told = f"{number:,} requests each, drawn from the trace's {len(first):,} in blocks of {block_s:.0f} s"
    if number == len(first):
        told = f"the trace as it is, and {told}"
    return Draws(tuple(options), number, rate_per_s * scale, shared_prefix_share(first), told)


class Like(Struct, frozen=True):
    """The traffic of a study as it is, and others like it.

    Attributes:
        options: of each, the traffic as it is first.
        alone: why there is one alone where more were wanted; else empty.
    """

    options: tuple[dict[str, Any], ...]
    alone: str = ""


def like_traffic(given: dict[str, Any], count: int | None, folder: Path) -> Like:
    """As many traffics as asked for, as long as the one that options describe; resamples are written into `folder`.

    None asks for `USUAL_DRAWS`, or one where the traffic has more than `MOST_REQUESTS`. Traffic that cannot be read is
    left as it is: its run says why.
    """
    own = {name: value for name, value in given.items() if name in TRAFFIC}
    wanted, seed = count or USUAL_DRAWS, own.get("seed", 0)
    if wanted == 1:
        return Like((own,), "repeats = 1")
    most = MOST_REQUESTS if count is None else None
    too_many = f"it has more than {MOST_REQUESTS:,} requests; repeats = {USUAL_DRAWS} draws more of it"
    if own.get("trace") is None:
        if most is not None and own.get("num_prompts", 0) > most:
            return Like((own,), too_many)
        return Like((own, *({**own, "seed": seed + place} for place in range(1, wanted))))
    if own.get("closed_sessions"):
        return Like((own,), "turns of sessions that wait for answers are not resampled")
    scale, shaped = own.get("rate_scale", 1.0), {**own, "rate_scale": 1.0}
    try:
        requests = list(islice(traffic(build_scenario(shaped)), None if most is None else most + 1))
    except (UserError, TraceError) as error:
        return Like((own,), str(error))
    if most is not None and len(requests) > most:
        return Like((own,), too_many)
    if len(requests) < 2 or not requests[-1].arrival_s > requests[0].arrival_s:
        return Like((own,), "requests that arrive at one moment are not resampled")
    block_s = _block_s(requests[-1].arrival_s - requests[0].arrival_s)
    name = hashlib.sha256(msgspec.json.encode(own, order="sorted")).hexdigest()[:8]
    kept = {"max_concurrency": own["max_concurrency"]} if "max_concurrency" in own else {}
    found = [own]
    for place in range(1, wanted):
        path = folder / f"traffic-{name}-{place}.csv"
        drawn = resample(requests, block_s, seed + place)
        try:
            write_trace(islice(drawn, len(requests)), path)
        except TraceError as error:
            raise UserError(str(error)) from error
        found.append({"trace": str(path), "rate_scale": scale, "seed": seed + place, **kept})
    return Like(tuple(found))


def _block_s(span_s: float) -> float:
    """Length of the blocks that traffic is resampled in, s."""
    return max(span_s / BLOCKS, min(LEAST_BLOCK_S, span_s / 5))


def _rate(requests: list[Request]) -> float:
    """Requests/s of arrivals over time."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s if len(requests) > 1 else 0.0
    if not span_s > 0:
        raise UserError("all requests arrive at once: give arrivals over time (a finite --request-rate)")
    return (len(requests) - 1) / span_s
