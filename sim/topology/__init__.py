"""Several engines as one service: which of them a request goes to.

`ROUTERS` is the catalogue by name. A router sees the request and read-only views of the engines at the time of its
arrival (`sim.topology.routers.EngineView`) and returns the place of one of them.
"""

from collections.abc import Callable

from sim.topology.routers import LeastLoaded, PowerOfTwo, PrefixAffinity, RoundRobin, Router, SessionAffinity

ROUTERS: dict[str, Callable[[int], Router]] = {
    "round-robin": lambda seed: RoundRobin(),
    "least-loaded": lambda seed: LeastLoaded(),
    "power-of-two": PowerOfTwo,
    "session-affinity": lambda seed: SessionAffinity(),
    "prefix-affinity": lambda seed: PrefixAffinity(),
}
"""Name -> a new router, from the seed of everything random."""
DEFAULT_ROUTER = "round-robin"
