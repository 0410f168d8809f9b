"""`sim.frozen`: what `dataclass(frozen=True)` makes, made sooner."""

import inspect
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.frozen import frozen
from sim.run.prepare import Setup


def made(decorator: Any) -> tuple[type, type]:
    @decorator
    class Base:
        number: int
        names: list[str] = field(default_factory=list)
        beside: tuple[int, ...] = field(default=(), kw_only=True)

        def __post_init__(self) -> None:
            if self.number < 0:
                raise ValueError(self.number)

    @decorator
    class Derived(Base):
        number: int = 7
        size: float = 1.5

    return Base, Derived


OURS, THEIRS = made(frozen), made(dataclass(frozen=True))
BY_PLACE = st.lists(st.integers(-1, 2), max_size=4)
BY_NAME = st.dictionaries(st.sampled_from(("number", "names", "beside", "size", "other")), st.integers(-1, 2))


def answers(kind: type, values: list[int], named: dict[str, int]) -> object:
    """What is made, in all that can be asked of it; or the error's type."""
    try:
        one, same = kind(*values, **named), kind(*values, **named)
    except (TypeError, ValueError) as error:
        return type(error)
    hashed = None
    try:
        hashed = hash(one)
    except TypeError:
        assert isinstance(one.names, list)
    other = replace(one, number=one.number + 1)
    return repr(one), vars(one), hashed, one == same, one == other, other.number, [f.name for f in fields(one)]


@given(st.sampled_from((0, 1)), BY_PLACE, BY_NAME)
def test_it_is_made_and_answers_as_a_dataclass(place, values, named):
    assert answers(OURS[place], values, named) == answers(THEIRS[place], values, named)


def test_help_shows_its_fields():
    shown = inspect.signature(OURS[1])
    assert [*shown.parameters] == [*inspect.signature(THEIRS[1]).parameters] == ["number", "names", "size", "beside"]
    assert str(shown) == "(number: int = 7, names: list[str] = [], size: float = 1.5, *, beside: tuple[int, ...] = ())"
    assert "scenario" in inspect.signature(Setup).parameters


def test_nothing_of_it_can_be_changed():
    one = OURS[0](1)
    with pytest.raises(FrozenInstanceError):
        one.number = 2
    with pytest.raises(FrozenInstanceError):
        del one.number


@pytest.mark.parametrize("base, decorator", [(OURS[0], dataclass(frozen=True)), (THEIRS[0], frozen)])
def test_either_may_be_derived_from_the_other(base, decorator):
    @decorator
    class Derived(base):
        size: int = 3

    assert vars(Derived(1, size=4)) == {"number": 1, "names": [], "beside": (), "size": 4}
    with pytest.raises(ValueError):
        Derived(-1)
