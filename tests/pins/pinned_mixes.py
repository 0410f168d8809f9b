"""Which parts go together, and what those that do not are refused with."""

from collections import defaultdict
from dataclasses import replace
from itertools import product

from pinned import Answers, Table

from kvtwin.testing import limits, linear_machine
from kvtwin.testing.conformance import limits_of
from kvtwin.testing.engines import build_engine
from sim.engine.limits import Role
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.parts.catalogue import CATALOGUE
from sim.systems import POLICIES

ALSO = "vllm-v1:kv-offloading-size=1", "layerkv:order=mlfq", "vllm-recompute:batching=unified"
HANDING_OVER = "vllm-recompute:stage=hand-over", "vllm-v1:kv-offloading-size=1,stage=hand-over"
"""These in engines that prefill for others and in those that decode what others have prefilled."""


def engines() -> dict[str, tuple[str, Role]]:
    """Systems, and the roles of their engines."""
    roles: tuple[Role, Role] = "prefill", "decode"
    alone: list[tuple[str, Role]] = [(system, "both") for system in (*POLICIES, *ALSO)]
    return {f"{system} ({role})": (system, role) for system, role in (*alone, *product(HANDING_OVER, roles))}


def ask(name: str) -> Answers:
    """A line for each refusal: the parts that meet it in place of the system's own."""
    system, role = engines()[name]
    refused: dict[str, list[str]] = defaultdict(list)
    for kind, names in CATALOGUE.items():
        for part in names:
            refused[refusal_of(system, f"{kind}={part}", role)].append(f"{kind}={part}")
    return {"parts": [f"{refusal}: {' '.join(found)}" for refusal, found in refused.items()]}


def refusal_of(system: str, part: str, role: Role) -> str:
    """Of an engine in that role, where prefixes are cached if they can be; "goes" if it can be built."""
    try:
        policy = parse_policy(f"{system}{',' if ':' in system else ':'}{part}", {})[1]
        limit = limits_of(policy, limits(block_bytes=65536.0), 8, None)
        limit = replace(limit, enable_prefix_caching=policy.can_cache_prefixes)
        build_engine(policy, limit, replace(linear_machine(), role=role), lambda seq: None)
    except UserError as error:
        return str(error)
    return "goes"


TABLES = {"mixes": Table(list(engines()), ask)}
