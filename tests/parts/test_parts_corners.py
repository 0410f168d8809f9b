"""Every system keeps to `kvtwin.testing.conformance` at the `corners` of what an engine may meet."""

import pinned_engines
import pytest
from corners import KINDS, corner

from kvtwin.testing.conformance import check_one
from kvtwin.testing.engines import simulate
from sim.clock.instance import Observer
from sim.engine.scheduler import Scheduler
from sim.kv.index.retained_chunks import ChunkStore
from sim.kv.memory import Memory
from sim.kv.offloading import OffloadingMemory, OffloadingPaged
from sim.kv.on_disk import DiskTieredMemory
from sim.kv.retained import RetentionMemory
from sim.kv.tiered import TieredMemory
from sim.kv.tiers.host_cache import HostCache
from sim.kv.tiers.replacement import Lru
from sim.options.policies import parse_policy

NAMES = [name for name in pinned_engines.names() if " " not in name]


@pytest.mark.parametrize("text", NAMES)
def test_systems_keep_to_what_they_must_at_the_corners(text: str) -> None:
    """Of every other kind a workload, those that the systems before and behind it do not have."""
    policy, place = parse_policy(text, {})[1], NAMES.index(text)
    for kind in [*KINDS][place % 2 :: 2]:
        check_one(policy, corner(kind, policy, place % 20))


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
    match memory:
        case OffloadingMemory() | OffloadingPaged():
            return [memory.connector.cache]
        case DiskTieredMemory():
            return [memory.cache, memory.disk_cache]
        case TieredMemory():
            return [memory.cache]
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
