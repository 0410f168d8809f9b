"""`Plan`: what to measure on this machine, in which order, and what is left out because of its limits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from calib.measure.grid import FULL, QUICK, Grid
from calib.measure.limits import Limits
from calib.measure.model_points import ModelPoints
from calib.measure.points import Point, pair, readable_bytes
from sim.specs.model_spec import ModelSpec

HOST_SHARE = 8
"""A copy is at most one part in so many of the free memory, since three buffers of its size are held."""


@dataclass(frozen=True)
class Plan:
    """Points to measure.

    Attributes:
        points: in the order of measuring.
        partners: what runs beside a point that has a `beside`.
        left_out: points of the grid that the machine has no room or time for, and why.
        built_layers: decoder layers to build, by model.
        kv_blocks: blocks of a model's KV cache per layer, by model.
        longest: most tokens of a sequence, by model.
        copy_bytes: size of the buffers that copies work in.
    """

    points: list[Point]
    partners: dict[Point, Point]
    left_out: dict[Point, str]
    built_layers: dict[str, int]
    kv_blocks: dict[str, int]
    longest: dict[str, int]
    copy_bytes: int


def make_plan(
    models: Mapping[str, ModelSpec],
    limits: Limits,
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
        ops: measure only these operations (also as the timed one of a pair); None: all.
    """
    grid = QUICK if quick else FULL
    wanted: list[Point] = []
    partners: dict[Point, Point] = {}
    left_out: dict[Point, str] = {}
    built: dict[str, int] = {}
    for point, partner in _machine_points(grid, limits):
        _sort_in(point, partner, _host_fault(point, limits), wanted, partners, left_out)
    for name, spec in models.items():
        shapes = ModelPoints(name, spec, limits, grid, quick, element_bytes)
        built[name] = shapes.built
        for point, partner in shapes.points():
            fault = shapes.fault(point) or (shapes.fault(partner) if partner else "")
            _sort_in(point, partner, fault or _host_fault(point, limits), wanted, partners, left_out)
    points = [p for p in dict.fromkeys(wanted) if ops is None or p.op in ops]
    used = points + [partners[p] for p in points if p in partners]
    return Plan(
        points=points,
        partners=partners,
        left_out={p: reason for p, reason in left_out.items() if ops is None or p.op in ops},
        built_layers=built,
        kv_blocks={name: max([1, *(p.blocks for p in used if p.model == name)]) for name in models},
        longest={name: max((p.length for p in used if p.model == name), default=1) for name in models},
        # Two copies that cross each other have half of the buffers each.
        copy_bytes=max((p.num_bytes * (2 if p.beside else 1) for p in used if p.op != "all_reduce"), default=0),
    )


def _sort_in(
    point: Point,
    partner: Point | None,
    fault: str,
    wanted: list[Point],
    partners: dict[Point, Point],
    left_out: dict[Point, str],
) -> None:
    if fault:
        left_out[point] = fault
        return
    wanted.append(point)
    if partner:
        partners[point] = partner


def _machine_points(grid: Grid, limits: Limits) -> Iterator[tuple[Point, Point | None]]:
    """What does not depend on a model."""
    for count in grid.launches:
        for graph in range(1 + limits.graphs):
            yield Point(op="launch", num_copies=count, graph=graph), None
    for op in ("d2h", "h2d"):
        for size in grid.copies:
            yield Point(op=op, num_bytes=size), None
        for size in grid.pageable:
            yield Point(op=op, num_bytes=size, memory="pageable"), None
        for piece, count in grid.scattered:
            yield Point(op=op, num_bytes=piece * count, num_copies=count), None
        for piece, count in grid.crossed:
            point = Point(op=op, num_bytes=piece * count, num_copies=count)
            yield point, None
            yield pair(point, "h2d" if op == "d2h" else "d2h")
    for size in grid.memcpys:
        yield Point(op="host_memcpy", num_bytes=size), None
    for size in grid.all_reduces:
        gpus = 2
        while gpus <= limits.num_gpus:
            yield Point(op="all_reduce", num_bytes=size, tp=gpus), None
            gpus *= 2


def _host_fault(point: Point, limits: Limits) -> str:
    room = limits.host_bytes // HOST_SHARE // (2 if point.beside else 1)
    if point.num_bytes > room:
        return f"the host has room for {readable_bytes(room)} of copies"
    return ""
