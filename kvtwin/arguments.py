"""What the functions of `kvtwin.api` and `kvtwin.studies` are given: of the right type, or refused in a line."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from sim.errors import UserError
from sim.options.policies import options_of
from sim.options.scenario import Scenario
from sim.options.values import convert
from sim.systems.base import Policy


def checked(name: str, value: object, kinds: type | tuple[type, ...], what: str) -> Any:  # noqa: ANN401
    """The value; UserError where it is of none of `kinds`. True and False are no numbers."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds in (int, (int, float))):
        raise UserError(f"{name}: {value!r} is not {what}")
    return value


def scenario_of(value: object) -> Scenario:
    """UserError where it is none."""
    return checked("scenario", value, Scenario, "a kvtwin.Scenario; write kvtwin.Scenario(workload='sharegpt')")


def policy_of(value: object) -> str | Policy:
    """A policy's text, or a preset whose options have their types."""
    found: str | Policy = checked("policy", value, (str, Policy), "a policy's text, as --policy takes it, or a preset")
    if isinstance(found, str):
        return found
    for option in options_of(type(found)):
        given = getattr(found, option.name)
        if given is not None or NoneType not in get_args(option.hint):
            convert(f"policy: {found.name} {option.name}", given, option.hint)
    return found


def policies_of(value: object) -> list[str | Policy]:
    """A list of policies."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UserError(f"policies: {value!r} is not a list of policies; write ['vllm-v1', 'layerkv']")
    return [*map(policy_of, value)]


def path_of(name: str, value: object) -> Path:
    """A path that a file system can have."""
    text = str(checked(name, value, (str, Path), "a path"))
    if not text or "\0" in text:
        raise UserError(f"{name}: {text!r} names no file or folder")
    return Path(text)


def study_of(value: object) -> Path | Mapping[str, Any]:
    """A study's file, or what would stand in one."""
    if not isinstance(value, Mapping):
        return path_of("study", checked("study", value, (str, Path), "a study file or a mapping of what stands in one"))
    _check_keys(value)
    return value


def _check_keys(table: Mapping[Any, Any]) -> None:
    for key, value in table.items():
        checked("study: the key", key, str, "text")
        for below in value if isinstance(value, list) else [value]:
            if isinstance(below, Mapping):
                _check_keys(below)


def check_means(jobs: object, max_seconds: object, address: object) -> None:
    """UserError where processes, seconds of a run or a cluster's address are none."""
    if jobs is not None:
        checked("jobs", jobs, int, "a number of processes")
    if max_seconds is not None and not checked("max_seconds", max_seconds, (int, float), "a number of seconds") > 0:
        raise UserError(f"max_seconds: {max_seconds} is not greater than 0; give more, or leave it out")
    if address is not None:
        checked("address", address, str, "the address of a cluster's scheduler")


def names_of(values: Iterable[object]) -> list[str]:
    """Names of profiles."""
    return [checked("profiles", value, str, "a profile's name or file") for value in values]
