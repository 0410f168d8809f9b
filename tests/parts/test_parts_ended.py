"""What has ended is forgotten by every part: the strict form of what `conformance` asks of all systems."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pinned_engines
import pytest

from kvtwin.testing import limits, linear_machine, simulate
from kvtwin.testing.conformance import Workload, limits_of
from sim.engine.batch import DecodeBatch
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.options.policies import parse_policy
from sim.parts.base import Part
from sim.systems.base import Policy
from traces.request import Request

BOUNDED = {
    "_looked_up", "_looked_on_host", "_looked_at", "_writer",  # the last one
    "_plans",  # of no request: a chunk of each length
    "owner",  # of each chunk that is cached
}  # fmt: skip
NAMES = [name for name in pinned_engines.names() if " " not in name]


def remembered(value: object, path: str, seen: dict[int, object]) -> Iterator[str]:
    """Where sequences are held, from a part's attribute on; not through other parts, which speak for themselves."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    inner: Iterable[tuple[object, str]] = ()
    if isinstance(value, Sequence):
        yield path
    elif isinstance(value, dict):
        inner = ((item, path) for pair in value.items() for item in pair)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner = ((item, path) for item in value)
    elif type(value).__module__.startswith(("sim.parts.", "sim.kv.")):
        names = {*vars(value)} if hasattr(value, "__dict__") else set()
        for kind in type(value).__mro__:
            names.update(getattr(kind, "__slots__", ()))
        inner = ((getattr(value, name), f"{path}.{name}") for name in names - BOUNDED if hasattr(value, name))
    for item, where in inner:
        if not isinstance(item, Part | Scheduler | DecodeBatch):
            yield from remembered(item, where, seen)


def held(policy: Policy, work: Workload) -> list[str]:
    """Where the parts of a system hold sequences after a run, which all have left."""
    outcome = simulate(policy, work.arrivals, work.limits, machine=work.machine, checked=False)
    assert len(outcome.ended) == len(work.arrivals)
    parts = outcome.scheduler.parts
    return [
        where
        for part in parts
        for attribute, value in vars(part).items()
        if attribute not in BOUNDED and not isinstance(value, Part | Scheduler | DecodeBatch)
        for where in remembered(value, f"{type(part).__name__}.{attribute}", {})
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_has_ended_is_forgotten(name):
    policy = parse_policy(name, {})[1]
    assert held(policy, pinned_engines.workload(policy, 3)) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_never_fits_is_forgotten(name):
    """Four blocks of 16 tokens: room for one of three prompts. Looked up, those that begin alike are noted."""
    policy = parse_policy(name, {})[1]
    limit = limits_of(policy, limits(gpu=4, host=8, max_model_len=128, block_bytes=65536.0), 8, None)
    limit = replace(limit, enable_prefix_caching=policy.can_cache_prefixes)
    arrivals = [
        Request(i, 0.1 * i, tokens, 3, hash_ids=tuple(range(-(-tokens // 16))), hash_block_tokens=16)
        for i, tokens in enumerate((40, 100, 120))
    ]
    assert held(policy, Workload(arrivals, limit, linear_machine(65536.0))) == []
