"""Which parts can replace one of a system's own, and why others cannot."""

from dataclasses import replace
from typing import NamedTuple

from kvtwin.testing.engines import limits, linear_machine
from sim.engine.itl import GapCollector
from sim.engine.limits import Role
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.parts.catalogue import CATALOGUE
from sim.systems.base import Asked

CONTEXT_TOKENS = 512
"""Of the model that engines are built for; it has plain layers, as most do."""


class Mix(NamedTuple):
    """A system with another part in place of its own."""

    system: str
    kind: str
    part: str
    refusal: str
    """Why it cannot be; empty: it can."""


def single_replacements(system: str) -> list[Mix]:
    """Every part that the system does not have itself, in its place. Options are left at their defaults."""
    own = parse_policy(system, {})[1].names
    return [
        Mix(system, kind, part, refusal(system, kind, part))
        for kind, parts in CATALOGUE.items()
        for part in parts
        if part != own[kind]
    ]


def refusal(system: str, kind: str, part: str) -> str:
    """Why no engine can be built, or of systems that hand over not one of either pool; empty where they can."""
    try:
        _, policy = parse_policy(f"{system}:{kind}={part}", {})
        engine = policy.engine_limits(Asked(CONTEXT_TOKENS))
        limit = replace(
            limits(block_bytes=65536.0, max_model_len=CONTEXT_TOKENS),
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            enable_chunked_prefill=engine.enable_chunked_prefill,
            # A cache is what many parts are there for.
            enable_prefix_caching=policy.can_cache_prefixes,
        )
        roles: tuple[Role, ...] = ("prefill", "decode") if policy.hands_over else ("both",)
        for role in roles:
            policy.scheduler(limit, GapCollector(), replace(linear_machine(), role=role).deployment)
    except UserError as error:
        return str(error)
    return ""


def table(systems: list[str]) -> list[str]:
    """Lines of a Markdown table: of each system, how many parts can replace one of its own, and which."""
    lines = [f"| system | replacements | {' | '.join(CATALOGUE)} |", f"|---|--:|{'---|' * len(CATALOGUE)}"]
    assembled = asked = 0
    for system in systems:
        mixes = single_replacements(system)
        going = [mix for mix in mixes if not mix.refusal]
        cells = [", ".join(mix.part for mix in going if mix.kind == kind) for kind in CATALOGUE]
        lines.append(f"| `{system}` | {len(going)} of {len(mixes)} | {' | '.join(cells)} |")
        assembled, asked = assembled + len(going), asked + len(mixes)
    return [*lines, f"| all | {assembled} of {asked} |{' |' * len(CATALOGUE)}"]
