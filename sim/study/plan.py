"""`plan`: which deployment, on how many GPUs, for this traffic under these SLOs; and what the answer hangs on.

Objectives: `gpus`, the fewest for the traffic; `goodput`, the most traffic within the SLOs on at most so many;
`cost`, the cheapest an hour; `energy`, the least power of boards. Layouts and knobs are searched jointly
(`sim.study.race`), and the last few are tried on several draws of the traffic in full (`sim.study.draws`): answers are
intervals over these.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log2
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from sim.errors import UserError
from sim.options.scenario import OF_LAYOUTS, Scenario
from sim.options.values import convert, flag
from sim.parts.options import refuse_idle
from sim.specs.hardware import load_hardware
from sim.study.deployments import Deployment, Layouts, Space
from sim.study.draws import TRAFFIC, Draws, draws
from sim.study.intervals import apart, of_another_draw
from sim.study.limits import FP8_KV, SPEED_ERRORS, Gain, bound_by, changes, faster, gains_of
from sim.study.points import setup_of
from sim.study.race import LONGER_S, STEP, Bar, Ground, Raced, Work, race, requests_of
from sim.study.search import DEFAULT_SLO, PRECISION, Ran, Reached, Slo, answers, check_slos, mean_of, most_load, runs
from sim.study.sweep import Means, Store
from sim.systems import DEFAULT_POLICY

Objective = Literal["gpus", "goodput", "cost", "energy"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
LINK_GBPS = 400.0
"""Of an engine in a pool where none is given: one port of today's InfiniBand (NDR)."""
FINALISTS = 3
WORTH_TRYING = 0.6
"""Share of the best load below which the best of another family is not tried in full."""
EXPLAINED_ON = 3
"""Draws at whose begin limits are raised: one alone has too few requests beyond a P99 to tell some percent."""
GUESSED_RUNS, BESIDE_RUNS = 6.0, 2.5
"""For the bar: runs that a search takes, about: from a guess of the race, beside what is known."""


class Asked(Struct, frozen=True):
    """What a plan is asked for.

    Attributes:
        fixed: options by field of all deployments and of the traffic.
        gpus: kinds, one of which is taken.
        usd_per_hour: of a GPU, by kind; for the objective `cost`.
        board_w: most power that a GPU's board draws, by kind; for the objective `energy`.
        seeds: draws of the traffic.
    """

    fixed: dict[str, Any]
    gpus: tuple[str, ...]
    max_gpus: int
    slos: tuple[Slo, ...]
    objective: Objective = "gpus"
    usd_per_hour: dict[str, float] = {}
    board_w: dict[str, float] = {}
    policies: tuple[str, ...] = (DEFAULT_POLICY,)
    layouts: Layouts = "both"
    link_gbps: float = LINK_GBPS
    seeds: int = 5

    def price(self, gpu: str) -> float:
        """What one GPU of a kind counts in the objective; 0 where their number is given."""
        if self.objective == "goodput":
            return 0.0
        return {"cost": self.usd_per_hour, "energy": self.board_w}.get(self.objective, {}).get(gpu, 1.0)


OWN = ("gpu", "policy", "max_gpus", "slo", "objective", "gpu_hour_usd", "layouts", "seeds")
"""Keys of a question that are no options of its runs."""
SERVER_GPUS = 8


def read_plan(given: Mapping[str, Any]) -> Asked:
    """A question from options by field and the keys of `OWN`, those that are not given left out or None.

    Raises:
        UserError: a value is none of its kind, no SLO is given, or what the objective needs is missing.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name in ("data_parallel_size", "enable_expert_parallel"):
        if given.get(name):
            raise UserError(f"{flag(name)}: plan searches no such deployments; leave it out, and compare with `run`")
    for name in set(OF_LAYOUTS) - {"tp", "enable_expert_parallel"} & given.keys():
        raise UserError(f"{flag(name)}: is what plan looks for; leave it out (--tp and --layouts narrow the search)")
    fixed: dict[str, Any] = {"model": Scenario.model} | {
        name: value for name, value in given.items() if name not in OWN
    }
    objective = given.get("objective", "gpus")
    if objective not in OBJECTIVES:
        raise UserError(f"--objective: {objective!r} is not one of {', '.join(OBJECTIVES)}")
    gpus = tuple(dict.fromkeys(given.get("gpu", (Scenario.gpu,))))
    words = tuple(given.get("slo", ()))
    if not words and not fixed.get("goodput"):
        raise UserError("--slo: is missing; give bounds, such as --slo p99_ttft_ms:1000 p99_tpot_ms:50")
    slos = tuple(Slo.parse(word, "--slo") for word in words or (DEFAULT_SLO,))
    check_slos(slos, "--slo", counts_goodput=bool(fixed.get("goodput")))
    prices = _prices(tuple(given.get("gpu_hour_usd", ())), gpus)
    if objective == "cost" and not prices:
        raise UserError(
            "--objective cost: needs prices, which do not ship; give what your seller asks, as "
            f"--gpu-hour-usd {' '.join(f'{gpu}=2.50' for gpu in gpus)}"
        )
    power = {gpu: load_hardware(gpu).board_power_w for gpu in gpus} if objective == "energy" else {}
    if missing := [gpu for gpu, watts in power.items() if watts is None]:
        raise UserError(
            f"--objective energy: the specification of {missing[0]} has no board_power_w; give it in its file"
        )
    counts = {}
    for name, usual, most in (("max_gpus", SERVER_GPUS, 64), ("seeds", 5, 100)):
        counts[name] = convert(flag(name), given.get(name, usual), int)
        if not 1 <= counts[name] <= most:
            raise UserError(f"{flag(name)}: {counts[name]} is not between 1 and {most}")
    layouts = convert("--layouts", given.get("layouts", "both"), Layouts)
    policies = tuple(given.get("policy", ())) or (DEFAULT_POLICY,)
    link = fixed.pop("link_gbps", LINK_GBPS)
    board_w = {gpu: watts for gpu, watts in power.items() if watts is not None}
    return Asked(
        fixed, gpus, counts["max_gpus"], slos, objective, prices, board_w, policies, layouts, link, counts["seeds"]
    )


def _prices(words: Sequence[str], gpus: Sequence[str]) -> dict[str, float]:
    """USD of an hour by kind, from `2.5` or `h100=2.5`."""
    found: dict[str, float] = {}
    for word in words:
        name, equals, text = str(word).rpartition("=")
        price: float = convert(f"--gpu-hour-usd: {word}", text, float)
        if not price > 0 or (equals and name not in gpus):
            raise UserError(f"--gpu-hour-usd: {word} is no price above 0 of {' or '.join(gpus)}; write {gpus[0]}=2.50")
        found |= {name: price} if equals else dict.fromkeys(gpus, price)
    if found and (missing := [gpu for gpu in gpus if gpu not in found]):
        raise UserError(f"--gpu-hour-usd: none is given of {', '.join(missing)}; write {missing[0]}=2.50")
    return found


class Held(Struct, frozen=True):
    """The load that a deployment sustains on each draw, as a factor on the traffic; 0 where none."""

    deployment: Deployment
    reached: tuple[Reached, ...]

    @property
    def loads(self) -> tuple[float, ...]:
        """By draw."""
        return tuple(one.most for one in self.reached)

    @property
    def least(self) -> float:
        """Of all draws."""
        return min(self.loads)

    @property
    def mean(self) -> float:
        """Geometric; 0 where one draw has none."""
        return mean_of(self.reached).most

    @property
    def interval(self) -> tuple[float, float]:
        """Where the load of another like draw lies with 95 %."""
        return of_another_draw(self.loads, PRECISION)

    def ties(self, best: "Held") -> bool:
        """Whether it cannot be told from the best on the same draws: within two standard errors, or the precision."""
        if not (self.least > 0 and best.least > 0):
            return False
        mean, error = apart(best.loads, self.loads)
        return mean <= max(PRECISION, 2 * error)


class Size(Struct, frozen=True):
    """So many GPUs of a kind: what was raced on them, and what was tried on every draw, the best first.

    Attributes:
        load_wanted: as a factor on the traffic; None: all that can be had.
    """

    gpu: str
    num_gpus: int
    raced: list[Raced]
    held: list[Held] = []
    load_wanted: float | None = 1.0

    @property
    def best(self) -> Held | None:
        """What is taken: the best, but KV of fewer bits only where it saves a GPU."""
        most = self.best_of(self.held)
        plain = self.best_of([one for one in self.held if one.deployment.keeps_answers])
        if most is None or plain is None or most is plain:
            return most
        if self.load_wanted is not None:
            return plain if plain.least >= self.load_wanted else most
        # Loads are taken to grow with GPUs.
        return plain if plain.mean * (self.num_gpus + 1) >= most.mean * self.num_gpus else most

    @staticmethod
    def best_of(held: Sequence[Held]) -> Held | None:
        """Of those that cannot be told from the one that sustains most the simplest."""
        if not held:
            return None
        first = max(held, key=lambda one: one.mean)
        tied = [one for one in held if one is first or one.ties(first)]
        # None that is short of the traffic on some draw, where another is not.
        enough = [one for one in tied if one.least >= 1.0] or tied
        return min(enough, key=lambda one: one.deployment.simplicity)

    @property
    def load(self) -> float:
        """Most that was seen to be sustained."""
        if self.best is not None:
            return self.best.mean
        return self.raced[0].load if self.raced else 0.0


class Planned(Struct, frozen=True):
    """The answer.

    Attributes:
        sizes: all that were looked at, by kind and number.
        answer: the one that is taken; None where none meets the SLOs.
        fewest, most: of GPUs, over 95 % of like traffic; None: more than may be had.
        figures: of each draw at the traffic as it is (`goodput`: at the load sustained).
        gains: what binds the answer, and what more would buy.
        slower, faster: load sustained on GPUs that much slower and faster than their profile says.
        refused: reasons, with what they kept from being tried.
    """

    asked: Asked
    draws: Draws
    sizes: list[Size]
    answer: Size | None
    fewest: int | None
    most: int | None
    figures: list[Ran]
    gains: list[Gain]
    slower: float | None
    faster: float | None
    speed_error: float
    refused: dict[str, list[str]]

    @property
    def best(self) -> Held | None:
        """The deployment that is taken, with its loads."""
        return self.answer.best if self.answer else None

    @property
    def binds(self) -> str | None:
        """The limit that binds it."""
        return bound_by(self.gains)


def plan(asked: Asked, folder: Path, means: Means, bar: Bar | None = None) -> Planned:
    """Search. Runs are kept in `folder` as those of a sweep are: the same command goes on where it was interrupted.

    Raises:
        UserError: the traffic or an option is bad, nothing can be deployed, or the folder cannot be written.
    """
    return _Planner(asked, folder, means, bar).plan()


class _Planner:
    def __init__(self, asked: Asked, folder: Path, means: Means, bar: Bar | None) -> None:
        self.asked, self.means, self.store, self.work = asked, means, Store(folder), Work(bar)
        self.draws = found = draws(asked.fixed, asked.seeds + 1, folder)
        # Raced on a draw that decides nothing later.
        self.ground = Ground(
            lambda span_s, load: found.head(asked.seeds, span_s, load), asked.slos, self.store, means, self.work
        )
        engine = {name: value for name, value in asked.fixed.items() if name not in TRAFFIC}
        self.spaces = {
            gpu: Space(
                engine, gpu, asked.policies, asked.layouts,
                shares_prefixes=found.shares_prefixes, link_gbps=asked.link_gbps,
            )
            for gpu in asked.gpus
        }  # fmt: skip
        self.refused: dict[str, list[str]] = {}
        self.sizes: dict[tuple[str, int], Size] = {}
        self._has: dict[tuple[str, int], list[Deployment]] = {}

    def plan(self) -> Planned:
        head = self.draws.head(0, LONGER_S, 1.0)["num_prompts"]
        self.work.expect("what binds", (GUESSED_RUNS + 10 * BESIDE_RUNS) * EXPLAINED_ON * head)
        self._expect_draws(FINALISTS)
        can = [gpu for gpu in self.asked.gpus if self._sizes_of(gpu)]
        refuse_idle(one for space in self.spaces.values() for one in space.conditional)
        if not can:
            reasons = "; ".join(reason for space in self.spaces.values() for reason in space.refused)
            raise UserError(f"nothing can be deployed on up to {self.asked.max_gpus} GPUs: {reasons}")
        found = [one for gpu in can if (one := self._of_kind(gpu)) is not None]
        answer = min(found, key=self._rank) if found else None
        return self._explained(answer)

    def _rank(self, size: Size) -> tuple[float, float]:
        """By the objective, then by the load; less is better."""
        return self.asked.price(size.gpu) * size.num_gpus, -size.load

    # -- sizes ------------------------------------------------------------------------------------------------------

    def _sizes_of(self, gpu: str) -> list[int]:
        return [count for count in range(1, self.asked.max_gpus + 1) if self._deployments(gpu, count)]

    def _deployments(self, gpu: str, count: int) -> list[Deployment]:
        if (gpu, count) not in self._has:
            self._has[gpu, count] = self.spaces[gpu].of(count)
        return self._has[gpu, count]

    def _raced(self, gpu: str, count: int, start: float) -> Size:
        if (gpu, count) not in self.sizes:
            self.work.expect(stage := f"{count} {gpu}", self._race_requests(gpu, count, start))
            self.work.begin(stage)
            raced, refused = race(self._deployments(gpu, count), self.ground, start)
            for reason, names in refused.items():
                self.refused.setdefault(reason, []).extend(names)
            wanted = None if self.asked.objective == "goodput" else 1.0
            self.sizes[gpu, count] = Size(gpu, count, raced, load_wanted=wanted)
        return self.sizes[gpu, count]

    def _race_requests(self, gpu: str, count: int, start: float) -> float:
        return requests_of(self._deployments(gpu, count), self.ground, start)

    def _full(self, gpu: str, count: int, start: float) -> Size:
        """With its best tried on every draw in full."""
        size = self._raced(gpu, count, start)
        if size.held or not size.raced:
            return size
        first, *others = _finalists(size.raced)
        self._expect_draws(1 + len(others))
        self.work.begin("every draw")
        traffics = [self._traffic(number) for number in range(self.asked.seeds)]
        asked = [(first.deployment.options, [(first.load, STEP**0.5)] * len(traffics))]
        (reached,) = self._searched(asked, traffics)
        # How much harder one draw is than another it is for all of them.
        scales = [(on_draw.most or first.load) / first.load for on_draw in reached]
        asked = [(one.deployment.options, [(one.load * scale, 1.0 + PRECISION) for scale in scales]) for one in others]
        found = [reached, *self._searched(asked, traffics)]
        held = [Held(one.deployment, reached) for one, reached in zip((first, *others), found, strict=True)]
        held.sort(key=lambda one: -one.mean)
        self.sizes[gpu, count] = replace(size, held=held)
        return self.sizes[gpu, count]

    def _expect_draws(self, num_deployments: int) -> None:
        """So many are tried on every draw; of the fewest GPUs the size below as well, if none was yet."""
        is_first = not any(size.held for size in self.sizes.values())
        sizes = 2 if is_first and self.asked.objective != "goodput" else 1
        each = (GUESSED_RUNS + (num_deployments - 1) * BESIDE_RUNS) * self.asked.seeds * self.draws.num_requests
        self.work.expect("every draw", sizes * each)

    def _searched(
        self, asked: Sequence[tuple[dict[str, Any], Sequence[tuple[float, float]]]], traffics: Sequence[dict[str, Any]]
    ) -> list[tuple[Reached, ...]]:
        """What options sustain on each traffic, beginning at the loads and with the steps beside them."""
        searches = [
            most_load({**traffic, **options}, self.asked.slos, start=start, step=step, is_near=True)
            for options, begins in asked
            for traffic, (start, step) in zip(traffics, begins, strict=True)
        ]
        reached = answers(searches, self.store, self.means, self.work.of(traffics), self.asked.slos)
        size = len(traffics)
        return [tuple(reached[at : at + size]) for at in range(0, len(reached), size)]

    def _traffic(self, number: int) -> dict[str, Any]:
        return {**self.draws.options[number], "num_prompts": self.draws.num_requests}

    # -- objectives -------------------------------------------------------------------------------------------------

    def _of_kind(self, gpu: str) -> Size | None:
        """The best of a kind of GPU; None where none meets the SLOs."""
        counts = self._sizes_of(gpu)
        return self._most(gpu, counts) if self.asked.objective == "goodput" else self._fewest(gpu, counts)

    def _most(self, gpu: str, counts: Sequence[int]) -> Size | None:
        """Most load on the largest size; smaller ones are raced too, for the front."""
        tried = [count for count in counts if not count & (count - 1) or count == counts[-1]]
        load = 1.0
        for place, count in enumerate(tried):
            for later in tried[place + 1 :]:
                self.work.expect(f"{later} {gpu}", self._race_requests(gpu, later, load * later / count))
            size = self._raced(gpu, count, load)
            load = size.load * 2 if size.load else load
        size = self._full(gpu, counts[-1], load / 2)
        return size if size.load > 0 else None

    def _fewest(self, gpu: str, counts: Sequence[int]) -> Size | None:
        """The fewest that sustain the traffic on every draw, and the next ones on both sides."""
        place = self._guessed(gpu, counts)
        while place < len(counts):
            size = self._full(gpu, counts[place], 1.0)
            if size.best is not None and size.best.least >= 1.0:
                break
            place += 1
        if place == len(counts):
            return None
        while place > 0:
            below = self._full(gpu, counts[place - 1], counts[place - 1] / counts[place])
            if below.best is None or below.best.least < 1.0:
                break
            place -= 1
        best = self.sizes[gpu, counts[place]].best
        if best is not None and best.interval[0] < 1.0 and place + 1 < len(counts):
            self._full(gpu, counts[place + 1], counts[place + 1] / counts[place])
        return self.sizes[gpu, counts[place]]

    def _guessed(self, gpu: str, counts: Sequence[int]) -> int:
        """The place of the fewest by the race alone: loads are taken to grow with GPUs, sizes between are raced."""
        bad, good, place, load = -1, len(counts), len(counts) // 2, 1.0
        while good - bad > 1:
            place = min(max(place, bad + 1), good - 1)
            others = max(ceil(log2(good - bad)) - 1, 0)
            self.work.expect("other sizes", others * self._race_requests(gpu, counts[place], load))
            size = self._raced(gpu, counts[place], load)
            if size.load >= 1.0:
                good = place
            else:
                bad = place
            wanted = ceil(counts[place] / size.load) if size.load > 0 else counts[-1]
            load = size.load / counts[place] * min(wanted, counts[-1]) or 1.0
            place = next((at for at, count in enumerate(counts) if count >= wanted), len(counts) - 1)
        self.work.expect("other sizes", 0.0)
        return good

    # -- what it hangs on -------------------------------------------------------------------------------------------

    def _explained(self, answer: Size | None) -> Planned:
        refused = {reason: list(names) for space in self.spaces.values() for reason, names in space.refused.items()}
        for reason, names in self.refused.items():
            refused.setdefault(reason, []).extend(dict.fromkeys(names))
        sizes = sorted(self.sizes.values(), key=lambda one: (one.gpu, one.num_gpus))
        best = answer.best if answer is not None else None
        if answer is None or best is None:
            return Planned(self.asked, self.draws, sizes, None, None, None, [], [], None, None, 0.0, refused)
        self.work.begin("what binds")
        load = best.mean
        heads = [self.draws.head(number, LONGER_S, load) for number in range(min(self.asked.seeds, EXPLAINED_ON))]
        options = best.deployment.options
        base = {**options, **heads[0]}
        # What was tried in full is told by that.
        has_fp8 = not all(one.deployment.keeps_answers for one in answer.held)
        what_if = [one for one in changes(base) if one.name != FP8_KV or not has_fp8]
        error = SPEED_ERRORS[setup_of(base).profile.status]
        (first,) = self._searched([(options, [(load, STEP**0.5)] * len(heads))], heads)
        more = [(one.options, one.guess) for one in what_if]
        more += [(faster(base, speed), speed) for speed in (1 - error, 1 + error)]
        # What buys nothing meets and misses the SLOs where the deployment itself does: two runs, one ended early.
        asked = [({**options, **one}, [bracket(at, load, guess) for at in first]) for one, guess in more]
        rows = [first, *self._searched(asked, heads)]
        at_first, *changed, slow, fast = map(mean_of, rows)
        share = load / at_first.most if at_first.most else 0.0
        if self.asked.objective == "goodput":
            figures = [one.ran for one in best.reached if one.ran is not None]
        else:
            whole = [{**options, **self._traffic(number)} for number in range(self.asked.seeds)]
            figures = runs(whole, self.store, self.means, self.work.of(whole))
        fewest, most = self._interval(answer)
        return Planned(
            self.asked, self.draws, sizes, answer, fewest, most, figures, gains_of(what_if, at_first, changed),
            slow.most * share, fast.most * share, error, refused,
        )  # fmt: skip

    def _interval(self, answer: Size) -> tuple[int | None, int | None]:
        """Fewest and most GPUs of its kind that like traffic takes; sizes not tried scale with the nearest that was."""
        tried = [one for one in self.sizes.values() if one.gpu == answer.gpu and one.best is not None]
        counts = self._sizes_of(answer.gpu)

        def load(count: int, end: int) -> float:
            near = min(tried, key=lambda one: abs(one.num_gpus - count))
            best = near.best
            return best.interval[end] * count / near.num_gpus if best is not None else 0.0

        fewest = next((count for count in counts if load(count, 1) >= 1.0), None)
        most = next((count for count in counts if load(count, 0) >= 1.0), None)
        fewest = min(fewest or answer.num_gpus, answer.num_gpus)
        return fewest, None if most is None else max(most, answer.num_gpus)


def bracket(reached: Reached, load: float, factor: float) -> tuple[float, float]:
    """Where the search of something that brings such a factor begins, and its step: to the load that failed before."""
    most, failing = reached.most or load, reached.least_failing
    return most * factor, failing / most if reached.most and failing else 1.0 + PRECISION


def _finalists(raced: Sequence[Raced]) -> Iterator[Raced]:
    """The best few, and the best of each family that is not far behind."""
    seen: set[tuple[bool, bool]] = set()
    for place, one in enumerate(raced):
        new = one.deployment.family not in seen and one.load >= WORTH_TRYING * raced[0].load
        seen.add(one.deployment.family)
        if place < FINALISTS or new:
            yield one
