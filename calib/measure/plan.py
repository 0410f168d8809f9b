"""`Plan`: what to measure on this machine, in which order, and what is left out because of its limits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from calib.measure.capacity import Capacity
from calib.measure.grid import FULL, QUICK, Grid
from calib.measure.model_points import ModelPoints
from calib.measure.points import Point, readable_bytes
from sim.specs.model_spec import ModelSpec

HOST_SHARE = 8
"""A copy is at most one part in so many of the free memory, since three buffers of its size are held."""


@dataclass(frozen=True)
class Plan:
    """Points to measure.

    Attributes:
        points: in the order of measuring.
        left_out: points of the grid that the machine has no room or time for, and why.
        built_layers: decoder layers to build, by model.
        kv_blocks: blocks of a model's KV cache per layer, by model.
        longest: most tokens of a sequence, by model.
        copy_bytes: size of the buffers that copies work in.
    """

    points: list[Point]
    left_out: dict[Point, str]
    built_layers: dict[str, int]
    kv_blocks: dict[str, int]
    longest: dict[str, int]
    copy_bytes: int


def make_plan(
    models: Mapping[str, ModelSpec],
    limits: Capacity,
    *,
    quick: bool,
    element_bytes: int,
    ops: Sequence[str] | None = None,
) -> Plan:
    """The points for these models on this machine; the same arguments give the same plan.

    Args:
        models: specs by the name they have in samples.
        limits: of the machine.
        quick: the small grid.
        element_bytes: of weights and KV cache.
        ops: measure only these operations; None: all.
    """
    grid = QUICK if quick else FULL
    faults = {point: _host_fault(point, limits) for point in _machine_points(grid, limits)}
    built: dict[str, int] = {}
    for name, spec in models.items():
        shapes = ModelPoints(name, spec, limits, grid, quick, element_bytes)
        built[name] = shapes.built
        faults |= {point: shapes.fault(point) for point in shapes.points()}
    faults = {point: fault for point, fault in faults.items() if ops is None or point.op in ops}
    points = [point for point, fault in faults.items() if not fault]
    return Plan(
        points=points,
        left_out={point: fault for point, fault in faults.items() if fault},
        built_layers=built,
        kv_blocks={name: max([1, *(p.blocks for p in points if p.model == name)]) for name in models},
        longest={name: max((p.length for p in points if p.model == name), default=1) for name in models},
        copy_bytes=max((p.num_bytes for p in points if p.op != "all_reduce"), default=0),
    )


def _machine_points(grid: Grid, limits: Capacity) -> Iterator[Point]:
    """What does not depend on a model."""
    for count in grid.launches:
        for graph in range(1 + limits.graphs):
            yield Point(op="launch", num_copies=count, graph=graph)
    for op in ("d2h", "h2d"):
        for size in grid.copies:
            yield Point(op=op, num_bytes=size)
        for size in grid.pageable:
            yield Point(op=op, num_bytes=size, memory="pageable")
        for memory, pieces in (("pinned", grid.scattered), ("pinned-row", grid.staged)):
            for piece, count in pieces:
                yield Point(op=op, num_bytes=piece * count, num_copies=count, memory=memory)
    for size in grid.memcpys:
        yield Point(op="host_memcpy", num_bytes=size)
    for size in grid.all_reduces:
        gpus = 2
        while gpus <= limits.num_gpus:
            yield Point(op="all_reduce", num_bytes=size, tp=gpus)
            gpus *= 2


def _host_fault(point: Point, limits: Capacity) -> str:
    room = limits.host_bytes // HOST_SHARE
    if point.num_bytes > room:
        return f"the host has room for {readable_bytes(room)} of copies"
    return ""
