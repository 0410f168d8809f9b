"""What a study varies: axes of scenario fields, policies and their options, and the points that they span.

A study file is a scenario file with a table for the study, here `[sweep]`:

    model = "llama-2-7b"
    policy = ["vllm-v1", "layerkv"]          # several policies are an axis
    [sweep]
    repeats = 3                              # seeds seed, seed + 1, seed + 2
    [sweep.grid]                             # every combination
    request-rate = { log = [1, 8], num = 7 }
    max-num-seqs = [64, 128, 256]
    [[sweep.zip]]                            # go together, place by place
    gpu = ["l20", "a100-80g"]
    tp = [2, 1]
    [sweep.random]                           # as many draws
    samples = 20
    swap-space = { linear = [0, 64] }

Axes that begin with `profile-` change constants of the profile (`sim.cost.changed_profile`).
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from sim.cost.changed_profile import also_changed
from sim.errors import UserError
from sim.options.policies import has_option, owned_option
from sim.options.scenario import Outputs, Scenario
from sim.options.scenario_file import option_named, scenario_values
from sim.options.values import base_type, convert, option_fields

Value = bool | int | float | str | tuple[str, ...] | None
PROFILE = "profile_"
DIGITS = 6
"""Significant digits of values on a range: 1.58114, not 1.5811388300841898."""
RANGES = ("log", "linear")
OUTPUTS = {"out", *(f.name for f, _ in option_fields(Outputs))}
"""Options of a command that change no result."""
MOST_RUNS = 100_000
"""Of a study: each is a file, and one of 10 ms with all others is a quarter of an hour."""


class Study(Struct, frozen=True):
    """What is fixed, what varies, and how often each point is run.

    Attributes:
        fixed: options of every point by field, `policy` among them.
        axes: names in the order of the file.
        groups: what varies together, as the values of its axes at each of its places; groups vary independently.
        repeats: runs of a point, with seeds one apart.
        extra: what else stood in the study's table.
    """

    where: str
    fixed: dict[str, Any]
    axes: tuple[str, ...]
    groups: list[list[dict[str, Value]]]
    repeats: int
    extra: dict[str, Any]
    drawn: tuple[str, ...] = ()
    """Axes whose values were drawn at random."""

    @property
    def points(self) -> list[dict[str, Value]]:
        """The values of each point by axis."""
        return [{name: value for part in parts for name, value in part.items()} for parts in product(*self.groups)]

    def values(self, name: str) -> list[Value]:
        """The values of an axis, each once."""
        return list(dict.fromkeys(place[name] for group in self.groups if name in group[0] for place in group))


def _check_runs(study: Study) -> None:
    """UserError where a study's runs are too many."""
    runs = prod(map(len, study.groups)) * study.repeats
    if runs > MOST_RUNS:
        sizes = " x ".join(f"{len(group):,}" for group in study.groups)
        raise UserError(
            f"{study.where}: {sizes} points, {study.repeats:,} times each, are {runs:,} runs; a study has at most "
            f"{MOST_RUNS:,}: take fewer values, or draw some at random"
        )


def _fixed(table: Mapping[str, Any], section: str, where: str) -> dict[str, Any]:
    """Options that all points have; UserError that says where axes belong, if one of them looks like an axis."""
    for key, value in table.items():
        if isinstance(value, list):
            try:
                scenario_values({key: value}, where)
            except UserError as error:
                raise UserError(f"{error}; several values are an axis, which stands in [{section}.grid]") from error
    return scenario_values(table, where)


def read_study(table: Mapping[str, Any], section: str, where: str, extra: Mapping[str, Any] | None = None) -> Study:
    """A study from the table of its file; `extra` are keys of `[section]` beside the axes, with their types.

    Raises:
        UserError: an unknown key or axis, an empty range, an axis given twice or beside a fixed value.
    """
    own = table.get(section, {})
    if not isinstance(own, dict):
        raise UserError(f"{where}: {section} is {own!r}, not a table; write [{section}]")
    fixed = _fixed({key: value for key, value in table.items() if key != section}, section, where)
    for name in fixed.keys() & OUTPUTS:
        raise UserError(f"{where}: {name.replace('_', '-')} is said on the command line, not in a study; leave it out")
    extra = dict(extra or {})
    known = ("repeats", "grid", "zip", "random", *extra)
    for key in own:
        if key not in known:
            raise UserError(f"{where}: unknown key {section}.{key}; known: {', '.join(known)}")
    repeats = convert(f"{where}: {section}.repeats", own.get("repeats", 1), int)
    if repeats < 1:
        raise UserError(f"{where}: {section}.repeats = {repeats}; give 1 or more")
    _check_size(f"{where}: {section}.repeats", repeats)
    found = {key: convert(f"{where}: {section}.{key}", own[key], kind) for key, kind in extra.items() if key in own}

    drawn = _random(own, section, where, fixed)
    groups = [*_grid(own, section, where), *_zips(own, section, where), *drawn]
    policies = fixed.get("policy", ())
    if len(policies) > 1:
        groups.insert(0, [{"policy": policy} for policy in policies])
        del fixed["policy"]
    axes = [name for group in groups for name in group[0]]
    for name in axes:
        shown = name.replace("_", "-")
        if axes.count(name) > 1:
            raise UserError(f"{where}: axis {shown!r} stands twice in [{section}]; keep one")
        if name in fixed or (name == "seed" and repeats > 1):
            other = f"[{section}] repeats, which sets it" if name not in fixed else "as a fixed value too"
            raise UserError(f"{where}: {shown!r} is an axis and stands {other}; keep one")
    study = Study(where, fixed, tuple(axes), groups, repeats, found, tuple(drawn[0][0]) if drawn else ())
    _owned(study)
    # Whoever tries knobs one by one does not run every combination.
    if "trials" not in found:
        _check_runs(study)
    return study


def _check_size(place: str, number: int) -> None:
    if number > MOST_RUNS:
        raise UserError(f"{place} = {number}: a study has at most {MOST_RUNS:,} runs; give fewer")


def _owned(study: Study) -> None:
    """UserError for options of policies that no point runs."""
    texts = {str(policy) for policy in study.values("policy")} | set(study.fixed.get("policy", ()))
    names = {text.partition(":")[0] for text in texts if text} or {"vllm-v1"}
    for name in (*study.fixed, *study.axes):
        option = None if name == "policy" or name.startswith(PROFILE) else owned_option(name)
        if option is not None and not any(has_option(policy, option) for policy in names):
            shown = name.replace("_", "-")
            raise UserError(f"{study.where}: {shown!r} is an option of {option.policy}, which no point runs")


def _name(key: str, where: str) -> tuple[str, Any]:
    name = key.replace("-", "_")
    if name.startswith(PROFILE) and name != "profile":
        return name, float
    name, hint = option_named(key, where)
    if name in OUTPUTS:
        raise UserError(f"{where}: {key!r} is no axis: it changes no result")
    return name, str if name == "policy" else hint


def _grid(own: Mapping[str, Any], section: str, where: str) -> list[list[dict[str, Value]]]:
    place = f"{where}: [{section}.grid]"
    found = []
    for key, given in _table(own.get("grid", {}), place).items():
        name, hint = _name(key, place)
        values = _values(given, hint, f"{place} {key}")
        if len(set(values)) != len(values):
            raise UserError(f"{place} {key}: {given} has a value twice; keep one")
        found.append([{name: value} for value in values])
    return found


def _zips(own: Mapping[str, Any], section: str, where: str) -> list[list[dict[str, Value]]]:
    place, found = f"{where}: [[{section}.zip]]", []
    zips = own.get("zip", [])
    for given in zips if isinstance(zips, list) else [zips]:
        columns = {}
        for key, values in _table(given, place).items():
            name, hint = _name(key, place)
            columns[name] = _values(values, hint, f"{place} {key}")
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name.replace('_', '-')} {length}" for name, length in lengths.items())
            raise UserError(f"{place}: values go together, and their numbers differ: {told}; make them equal")
        found.append(_places(columns))
    return [group for group in found if group]


def _places(columns: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    """Axes that go together, place by place."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _random(own: Mapping[str, Any], section: str, where: str, fixed: Mapping[str, Any]) -> list[list[dict[str, Value]]]:
    place = f"{where}: [{section}.random]"
    table = dict(_table(own.get("random", {}), place))
    if not table:
        return []
    samples = convert(f"{place} samples", table.pop("samples", 0), int)
    if samples < 1:
        raise UserError(f"{place}: samples is missing or less than 1; say how many points to draw")
    _check_size(f"{place} samples", samples)
    draw = np.random.default_rng(fixed.get("seed", 0))
    columns: dict[str, list[Value]] = {}
    for key, given in table.items():
        name, hint = _name(key, place)
        if isinstance(given, dict):
            kind, low, high = _range(given, f"{place} {key}", ())
            spread = draw.uniform(0.0, 1.0, samples)
            numbers = low * (high / low) ** spread if kind == "log" else low + (high - low) * spread
            columns[name] = [_rounded(number, hint, f"{place} {key}") for number in numbers.tolist()]
        else:
            values = _values(given, hint, f"{place} {key}")
            columns[name] = [values[i] for i in draw.integers(len(values), size=samples)]
    return [_places(columns)]


def _table(given: object, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UserError(f"{place}: {given!r} is not a table of axes; write axis = [values]")
    return given


def _values(given: object, hint: Any, place: str) -> list[Value]:  # noqa: ANN401
    """The values of an axis: a list, `{ log = [a, b], num = n }`, or `{ linear = [a, b], num = n }`."""
    if isinstance(given, dict):
        return _span(given, hint, place)
    if not isinstance(given, list):
        raise UserError(f"{place} = {given!r} is not a list of values or a range such as {{ log = [1, 8], num = 4 }}")
    if not given:
        raise UserError(f"{place}: is empty; give at least one value")
    return [convert(place, value, hint) for value in given]


def _span(given: dict[str, Any], hint: Any, place: str) -> list[Value]:  # noqa: ANN401
    kind, low, high = _range(given, place, ("num",))
    num = convert(f"{place} num", given.get("num", 0), int)
    if num < 1:
        raise UserError(f"{place}: num is missing or less than 1, so the range is empty; say how many values")
    _check_size(f"{place} num", num)
    space = np.geomspace if kind == "log" else np.linspace
    found = [_rounded(number, hint, place) for number in space(low, high, num).tolist()]
    # Whole numbers close together round alike.
    return list(dict.fromkeys(found))


def _range(given: dict[str, Any], place: str, more: Sequence[str]) -> tuple[Literal["log", "linear"], float, float]:
    kinds = [kind for kind in RANGES if kind in given]
    unknown = given.keys() - {*RANGES, *more}
    if len(kinds) != 1 or unknown:
        raise UserError(f"{place} = {given} is not a range; write {{ log = [1, 8], num = 4 }} or linear instead of log")
    kind, ends = kinds[0], given[kinds[0]]
    if not isinstance(ends, list) or len(ends) != 2:
        raise UserError(f"{place}: {kind} = {ends!r} is not [least, most]")
    low, high = (convert(f"{place} {kind}", end, float) for end in ends)
    if not low < high or (kind == "log" and low <= 0) or high == float("inf"):
        above = " above 0" if kind == "log" else ""
        raise UserError(f"{place}: {kind} = {ends} is an empty range; give the least first, both finite{above}")
    return ("log" if kind == "log" else "linear"), low, high


def _rounded(number: float, hint: Any, place: str) -> Value:  # noqa: ANN401
    kind = base_type(hint)
    if kind is int:
        return round(number)
    if kind is not float:
        raise UserError(f"{place}: a range gives numbers, which this option does not take; list its values")
    return float(f"{number:.{DIGITS}g}")


def options_at(study: Study, point: Mapping[str, Value], repeat: int) -> dict[str, Any]:
    """The options of one run by field, the profile's changed constants in its name."""
    given: dict[str, Any] = {**study.fixed, **point}
    changes = {name.removeprefix(PROFILE): given.pop(name) for name in [*given] if name.startswith(PROFILE)}
    if changes:
        words = ",".join(f"{name}={value!r}" for name, value in changes.items())
        given["profile"] = also_changed(given.get("profile"), words)
    if study.repeats > 1:
        given["seed"] = given.get("seed", Scenario.seed) + repeat
    return given
