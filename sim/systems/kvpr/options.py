"""The option of KVPR's memory and stage."""

from dataclasses import dataclass

from sim.parts.options import option


@dataclass(frozen=True)
class PartialRecomputeOptions:
    """What decoding from the host can be told."""

    partial_recompute: bool = option(True, "make part of the KV from saved inputs; otherwise all of it is copied")
