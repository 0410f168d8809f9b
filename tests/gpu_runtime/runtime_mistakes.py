"""What may go wrong between a plan and a device: the plan is wrong, copies fail, memory runs out."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from gpu_runtime.kv.copy_engine import CopyEngine
from kvtwin.testing import live, requests
from kvtwin.testing.live import CheckedDevice, Served
from sim.engine.changes import Restore
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence


def misled(serve: Callable[[type[CheckedDevice]], object], part: str, wrong: Callable[[Any], Any]) -> int:
    """Serve with a mistake in every plan that it fits; how many plans those were.

    `wrong` gives what stands in a part of the plan in place of an item; None: nothing.
    """
    made: list[IterationPlan] = []

    class Misled(CheckedDevice):
        def execute(self, plan):
            before = tuple(getattr(plan, part))
            after = tuple(found for item in before if (found := wrong(item)) is not None)
            if after != before:
                made.append(plan)
                setattr(plan, part, after)
            return super().execute(plan)

    serve(Misled)
    return len(made)


LESS_RESTORED = {
    "a layer too few is projected": (
        "changes", lambda c: replace(c, hidden_groups=c.hidden_groups[1:]) if isinstance(c, Restore) else c,
    ),
    "a block too few is copied": (
        "changes", lambda c: replace(c, num_blocks=c.num_blocks - 1) if isinstance(c, Restore) else c,
    ),
    "a block too few is saved behind a prompt": ("behind", lambda m: replace(m, num_blocks=m.num_blocks - 1)),
    "nothing is saved behind a prompt": ("behind", lambda m: None),
}  # fmt: skip
"""A part of a plan that restores states, and what stands in an item's place (`misled`)."""


@contextmanager
def failing_copies(method: str, share: float) -> Iterator[None]:
    """A share of the calls of a method of `CopyEngine` starts copies that fail."""
    dice, right = random.Random(5), getattr(CopyEngine, method)

    def sometimes(self, *arguments):
        handle = right(self, *arguments)
        if dice.random() < share:
            handle.wait()
            handle.finish(RuntimeError("the link is down"))
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyEngine, method, sometimes)
        yield


@contextmanager
def running_out(owner: type, method: str, share: float) -> Iterator[None]:
    """A share of the calls of a method finds no memory."""
    dice, right = random.Random(2), getattr(owner, method)

    def sometimes(self, *arguments, **options):
        if dice.random() < share:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return right(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, sometimes)
        yield


def check_failures(served: Served, rows: list[tuple[float, int, int]], message: str) -> list[Sequence]:
    """Some failed, and each for that reason; the others have the right tokens. Returns the failed."""
    completed = live.check_tokens(served, requests(*rows))
    failed = [seq for seq in served.ended if seq.error]
    assert failed and len(failed) + len(completed) == len(rows)
    assert all(message in seq.error for seq in failed)
    return failed
