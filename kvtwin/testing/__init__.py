"""For tests of systems, in this repository and outside: small engines, and what every system must keep to.

from kvtwin.testing import conformance

def test_mine():
    conformance.check(MyPolicy())
"""

from kvtwin.testing.engines import (
    DECODE,
    PREFILL,
    SWAP_S_PER_BLOCK,
    CheckedEngine,
    Machine,
    Outcome,
    build_engine,
    check_pools,
    limits,
    linear_machine,
    requests,
    roofline_machine,
    simulate,
    tiny_model,
)

__all__ = [
    "DECODE",
    "PREFILL",
    "SWAP_S_PER_BLOCK",
    "CheckedEngine",
    "Machine",
    "Outcome",
    "build_engine",
    "check_pools",
    "limits",
    "linear_machine",
    "requests",
    "roofline_machine",
    "simulate",
    "tiny_model",
]
