"""Workloads at the corners of what an engine may meet: `pinned_engines` draws crowds in general.

Pools hold hardly more than one request, all requests are alike, times and limits are met exactly, prompts branch again
and again, bursts follow lulls.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from kvtwin.testing import Machine, linear_machine
from kvtwin.testing.conformance import DECODES, Workload, hosts_of, limits_of
from kvtwin.testing.engines import limits
from sim.systems.base import Policy
from traces.request import Request


def tight(rng: random.Random, policy: Policy, place: int) -> Workload:
    """Blocks of one or two tokens, a pool for hardly more than one request, a host for none, one or all."""
    block, length = rng.choice((1, 2)), rng.choice((12, 24))
    blocks = -(-length // block) + rng.choice((1, 2, 3, 8))
    host = rng.choice((0, 1, length // block, length // block + 1, 1000))
    limit = limits(blocks, host, block_size=block, max_model_len=length, block_bytes=65536.0 * block)
    seqs = rng.choice((2, 3, 8))
    limit = limits_of(policy, limit, seqs, rng.choice((None, seqs, 2 * seqs)))
    arrivals, now_s = [], 0.0
    for i in range(rng.choice((8, 14))):
        now_s += rng.choice((0.0, 0.0, 0.02, 0.1))
        prompt = rng.randint(1, length - 1)
        output = rng.choice((length - prompt, rng.randint(1, length - prompt), 1, 2))
        talk = rng.randrange(3)
        ids = tuple(talk * 1000 + k for k in range(-(-(prompt + output) // block)))
        named = -(-prompt // block)
        arrivals.append(
            Request(i, now_s, prompt, output, "", ids[:named], block, ids[named:], rng.randrange(3))
            if talk else Request(i, now_s, prompt, output)
        )  # fmt: skip
    return cached(Workload(arrivals, limit, machine(rng, policy, limit.block_bytes)), policy, place)


def alike(rng: random.Random, policy: Policy, place: int) -> Workload:
    """Requests of one shape, whole blocks or one token beside, at multiples of an iteration; pools for some exactly."""
    block = rng.choice((2, 4, 16))
    prompt = block * rng.choice((1, 2, 3)) + rng.choice((-1, 0, 0, 1))
    output = block * rng.choice((1, 2)) + rng.choice((-1, 0, 0, 1))
    num_blocks, together = -(-(prompt + output) // block), rng.choice((1, 2, 3))
    host = rng.choice((0, num_blocks, 2 * num_blocks, 1000))
    length = (num_blocks + rng.choice((0, 1))) * block
    limit = limits(
        num_blocks * together + rng.choice((0, 0, 1, 2)), host, block_size=block, max_model_len=length,
        block_bytes=65536.0 * block,
    )  # fmt: skip
    seqs = rng.choice((together, together + 1, 8))
    limit = limits_of(policy, limit, seqs, rng.choice((None, max(seqs, block), max(seqs, prompt), 2 * seqs + block)))
    step_s = 1 / 64
    times_s = sorted(step_s * (i // rng.choice((1, 2, 4))) * rng.choice((0, 1, 2)) for i in range(12))
    arrivals = [Request(i, now_s, prompt, output, priority=i % 2) for i, now_s in enumerate(times_s)]
    if place % 2:
        ids = [tuple(range(100 * (i % 3), 100 * (i % 3) + -(-prompt // block))) for i in range(12)]
        arrivals = [r._replace(hash_ids=i, hash_block_tokens=block) for r, i in zip(arrivals, ids, strict=True)]
    even = linear_machine(
        limit.block_bytes, prefill=(step_s, 0.0, 0.0), decode=(step_s, 0.0, 0.0), host=rng.choice(hosts_of(policy)),
        swap_s_per_block=rng.choice((step_s / 4, step_s)),
    )  # fmt: skip
    return cached(Workload(arrivals, limit, even), policy, place)


def branching(rng: random.Random, policy: Policy, place: int) -> Workload:
    """Prompts are paths in a tree that forks after each block or two; some end within a block, some where it forks."""
    block = rng.choice((1, 4, 16))
    named = rng.choice((block, block, 2 * block, max(block // 2, 1)))
    depth = rng.choice((4, 8))
    length = depth * named + 2 * block + 4
    blocks = -(-length // block) * rng.choice((2, 3, 5)) // 2 + 2
    host = rng.choice((0, 2, length // block, 3 * length // block, 1000))
    limit = limits(blocks, host, block_size=block, max_model_len=length, block_bytes=65536.0 * block)
    seqs = rng.choice((2, 4, 256))
    limit = limits_of(policy, limit, seqs, rng.choice((None, max(seqs, block), max(seqs, 2 * block + 1))))
    arrivals, now_s = [], 0.0
    for i in range(24):
        now_s += rng.choice((0.0, 0.0, 0.03, 0.2, 1.0))
        path, node = [], 0
        for level in range(rng.randint(1, depth)):
            node = 2 * node + 1 + (rng.random() < 0.35 if level % 2 else 0)
            path.append(node)
        prompt = max(1, len(path) * named - rng.choice((0, 0, 1, named - 1)))
        output = rng.randint(1, min(2 * block + 4, length - prompt))
        whole = prompt + output
        answer = path if whole <= len(path) * named else [*path, *(10**6 * (i + 1) + k for k in range(9 * block))]
        answer = answer[: -(-whole // named)]
        count = -(-prompt // named)
        arrivals.append(
            Request(i, now_s, prompt, output, "", tuple(path[:count]), named, tuple(answer[count:]), rng.randrange(2))
        )
    work = Workload(arrivals, limit, machine(rng, policy, limit.block_bytes))
    return cached(work, policy, 1)


def bursts(rng: random.Random, policy: Policy, place: int) -> Workload:
    """Four bursts with a lull before each, of five priorities, long ones and short."""
    block, length = rng.choice((4, 16)), 128
    blocks = length // block * rng.choice((9, 12, 20, 40)) // 8
    host = rng.choice((0, length // block, 4 * length // block, 1000))
    limit = limits(blocks, host, block_size=block, max_model_len=length, block_bytes=65536.0 * block)
    seqs = rng.choice((2, 5, 256))
    limit = limits_of(policy, limit, seqs, rng.choice((None, max(seqs, block), max(seqs, 48))))
    arrivals: list[Request] = []
    talks = [0] * 5
    for burst in range(4):
        for _ in range(rng.randint(3, 9)):
            now_s = burst * rng.choice((2.0, 9.0)) + rng.choice((0.0, 0.0, 0.01, 0.15))
            who = rng.randrange(5)
            asked, output = rng.choice(((rng.randint(1, 12), 1), (rng.randint(20, 50), rng.randint(2, 40)),
                                        (rng.randint(2, 20), rng.randint(20, 60))))  # fmt: skip
            prompt = talks[who] + asked if talks[who] + asked + output <= length else asked
            talks[who] = prompt + output
            ids = tuple(who * 1000 + k if k else 7 for k in range(-(-talks[who] // block)))
            count = -(-prompt // block)
            arrivals.append(Request(0, now_s, prompt, output, f"talk {who}", ids[:count], block, ids[count:],
                                    rng.randrange(5)))  # fmt: skip
    arrivals.sort(key=lambda request: request.arrival_s)
    arrivals = [request._replace(request_id=i) for i, request in enumerate(arrivals)]
    return cached(Workload(arrivals, limit, machine(rng, policy, limit.block_bytes)), policy, place)


def machine(rng: random.Random, policy: Policy, block_bytes: float) -> Machine:
    """Linear in all."""
    return linear_machine(
        block_bytes, decode=rng.choice(DECODES), host=rng.choice(hosts_of(policy)),
        swap_s_per_block=rng.choice((1e-4, 3e-3, 0.05)),
    )  # fmt: skip


def cached(work: Workload, policy: Policy, place: int) -> Workload:
    """With prefixes cached where `place` is odd, if the policy can."""
    if not (policy.can_cache_prefixes and place % 2):
        return work
    return Workload(work.arrivals, replace(work.limits, enable_prefix_caching=True), work.machine)


KINDS: dict[str, Callable[[random.Random, Policy, int], Workload]] = {
    "tight": tight, "alike": alike, "branching": branching, "bursts": bursts,
}  # fmt: skip


def corner(kind: str, policy: Policy, place: int) -> Workload:
    """The `place`-th of a kind."""
    return KINDS[kind](random.Random(f"{kind} {place}"), policy, place)
