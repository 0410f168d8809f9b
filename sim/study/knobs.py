"""Knobs drawn by Optuna instead of every combination: its trials are kept in a journal, or in a database for many."""

import hashlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim.errors import UserError
from sim.study.axes import Value

if TYPE_CHECKING:
    from sim.study.tune import Asked, Candidate

JOURNAL = "optuna.journal"
AT_ONCE = 4
"""Trials that are searched side by side; what each draws does not know of the others' answers."""


def by_trials(
    asked: "Asked",
    folder: Path,
    reach: "Callable[[Sequence[dict[str, Value]]], list[Candidate]]",
    jobs: int | None,
) -> "list[Candidate]":
    """As many candidates as trials are asked for, each knob one of its axis's values; an equal one counts once.

    Trials that the storage holds already count among them. The same seed and storage give the same trials.
    """
    # By name: pyright knows them only where the extra is installed.
    names = ("optuna", "optuna.storages", "optuna.storages.journal", "sqlalchemy.exc")
    try:
        optuna, storages, journal, sqlalchemy = (import_module(name) for name in names)
    except ImportError as error:
        raise UserError(
            f"{asked.study.where}: tune.trials: {error}; install kvtwin[optuna], or leave it out"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = asked.study
    values = {name: study.values(name) for name in study.axes}
    what = [study.fixed, values, asked.goal, [str(slo) for slo in asked.slos]]
    name = hashlib.sha256(msgspec.json.encode(what, order="sorted")).hexdigest()[:16]
    try:
        storage: Any = asked.storage or storages.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL)))
        kept = optuna.create_study(
            study_name=name,
            storage=storage,
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=study.fixed.get("seed", 0), constant_liar=True),
        )
    except (ImportError, ValueError, OSError, optuna.exceptions.OptunaError, sqlalchemy.SQLAlchemyError) as error:
        raise UserError(f"{study.where}: tune.storage = {asked.storage!r}: {str(error).splitlines()[0]}") from error
    finished = (optuna.trial.TrialState.COMPLETE,)
    found: dict[str, Candidate] = {}
    before = [trial for trial in kept.get_trials(states=finished) if "point" in trial.user_attrs]
    points = [_point(trial.params, values) for trial in before]
    left = (asked.trials or 0) - len(points)
    _add(found, reach(_new(found, points)))
    while left > 0:
        trials = [kept.ask() for _ in range(min(left, jobs or AT_ONCE))]
        drawn = [{name: _draw(trial, name, values[name]) for name in study.axes} for trial in trials]
        _add(found, reach(_new(found, drawn)))
        for trial, point in zip(trials, drawn, strict=True):
            value = found[_key(point)].value
            trial.set_user_attr("point", _key(point))
            kept.tell(trial, value or 0.0)
        left -= len(trials)
    return list(found.values())


def _draw(trial: Any, name: str, values: list[Value]) -> Value:  # noqa: ANN401 - optuna's own
    """One of the values: of numbers their place, so that neighbours are known to be near."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return values[trial.suggest_int(name, 0, len(values) - 1)]
    return values[trial.suggest_categorical(name, list(range(len(values))))]


def _point(params: dict[str, int], values: dict[str, list[Value]]) -> dict[str, Value]:
    return {name: values[name][place] for name, place in params.items()}


def _key(point: dict[str, Value]) -> str:
    return msgspec.json.encode(point).decode()


def _new(found: "dict[str, Candidate]", points: list[dict[str, Value]]) -> list[dict[str, Value]]:
    return list({_key(point): point for point in points if _key(point) not in found}.values())


def _add(found: "dict[str, Candidate]", candidates: "list[Candidate]") -> None:
    found.update({_key(candidate.point): candidate for candidate in candidates})
