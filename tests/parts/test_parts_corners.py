"""Every system keeps to `kvtwin.testing.conformance` at the `corners` of what may be, and forgets what has ended."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pinned_engines
import pytest
from corners import KINDS, corner

from kvtwin.testing import limits, linear_machine
from kvtwin.testing.conformance import Workload, check_one, limits_of
from kvtwin.testing.engines import simulate
from sim.clock.instance import Observer
from sim.engine.batch import DecodeBatch
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.kv.index.retained_chunks import ChunkStore
from sim.kv.memory import Memory
from sim.kv.offloading import Offloading, OffloadingPaged
from sim.kv.on_disk import DiskTier
from sim.kv.retained import RetentionMemory
from sim.kv.tiered import HostTier
from sim.kv.tiers.host_cache import HostCache
from sim.kv.tiers.replacement import Lru
from sim.options.policies import parse_policy
from sim.parts.base import Part
from sim.systems.base import Policy
from traces.request import Request

NAMES = [name for name in pinned_engines.names() if " " not in name]


@pytest.mark.parametrize("text", NAMES)
def test_systems_keep_to_what_they_must_at_the_corners(text: str) -> None:
    """Of every other kind a workload, those that the systems before and behind it do not have; with prefixes or not."""
    policy, place = parse_policy(text, {})[1], NAMES.index(text)
    for kind in [*KINDS][place % 2 :: 2]:
        check_one(policy, corner(kind, policy, place // 2 % 20))


def check_cache(cache: HostCache) -> None:
    """Its counts are those of its chunks."""
    chunks = {key: chunk for key in {*cache.keys()} if (chunk := cache.get(key)) is not None}
    idle = {key for key, chunk in chunks.items() if not chunk.num_copies}
    assert min((chunk.num_copies for chunk in chunks.values()), default=0) >= -1
    assert (cache.num_idle, cache.num_free) == (len(idle), cache.num_chunks - len(chunks))
    if isinstance(cache._chunks, Lru):
        assert (cache._chunks._idle, cache._chunks._ranks.keys()) == (idle, chunks.keys())


def check_store(store: ChunkStore) -> None:
    """Its counts are those of its chunks, each of which is somewhere."""
    chunks = store.chunks.values()
    assert store.num == [sum(chunk.is_idle and chunk.state == state for chunk in chunks) for state in range(3)]
    assert store.host_free == store.num_host - sum(chunk.on_host or chunk.is_leaving for chunk in chunks) >= 0
    assert all(chunk.on_gpu or chunk.on_host for chunk in chunks)
    assert all(chunk.on_gpu or not chunk.users for chunk in chunks)
    assert not any(chunk.is_leaving and chunk.on_host for chunk in chunks)
    assert all(min(chunk.users, chunk.copies) >= 0 for chunk in chunks)


def caches_of(memory: Memory) -> list[HostCache]:
    """Of the host and the disk."""
    match memory.backing or memory:
        case Offloading() | OffloadingPaged() as offloading:
            return [offloading.connector.cache]
        case DiskTier() as tier:
            return [tier.cache, tier.disk_cache]
        case HostTier() as tier:
            return [tier.cache]
        case _:
            return []


def watching(scheduler: Scheduler) -> Observer:
    """Checks what the tiers hold at every step."""
    memory = scheduler.memory

    def look(*_: object) -> None:
        for cache in caches_of(memory):
            check_cache(cache)
        if isinstance(memory, RetentionMemory):
            check_store(memory.store)

    return look


@pytest.mark.parametrize("text", [text for text in pinned_engines.TIERS if text not in ("hcache", "kvpr")])
def test_tiers_count_what_they_hold(text: str) -> None:
    """At every step; and no copy is left in the end."""
    policy = parse_policy(text, {})[1]
    for place, kind in enumerate(2 * list(KINDS)):
        work = corner(kind, policy, 1 + 2 * place)
        outcome = simulate(policy, work.arrivals, work.limits, machine=work.machine, observe=watching)
        for cache in caches_of(outcome.scheduler.memory):
            assert cache.num_idle + cache.num_free == cache.num_chunks


BOUNDED = {
    "_looked_up", "_looked_on_host", "_looked_at", "_writer",  # the last one
    "_plans",  # of no request: a chunk of each length
    "owner",  # of each chunk that is cached
}  # fmt: skip


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
