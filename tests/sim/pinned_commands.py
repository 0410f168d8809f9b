"""What commands print and draw, line by line, as it is pinned in `golden/commands/`.

    python tests/sim/pinned_commands.py      # writes golden/commands/*.txt anew

A picture is told by what is in it: its words, lines, bars, colours and axes, before anything is laid out. Read the
difference: it is what a user sees change.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from goldens import GOLDEN, POOLS, SMALL, TRAFFIC, digest, rounded
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    StrMethodFormatter,
)

import kvtwin
from sim.results.page.charts import charts
from sim.results.page.saved import read_sections
from sim.version import VERSION

COMMANDS = GOLDEN / "commands"
PROFILE = f"--profile {GOLDEN / 'l20-profile.json'}"
CROWD, TURNS = (f"{SMALL} {TRAFFIC[name]} {PROFILE}" for name in ("crowd", "turns"))
TWO = "--policy vllm-recompute --policy layerkv:slo-aware=false"
STUDY = f"""
workload = "fixed"
num-prompts = 30
output-len = 20
request-rate = 8
gpu = "l20"
profile = "{GOLDEN / "l20-profile.json"}"
goodput = ["ttft:300"]
policy = ["vllm-v1", "vllm-recompute"]
"""
GRID = "input-len = [100, 800]\nmax-num-seqs = [1, 16]\n"
STUDIES = {
    "sweep": f"[sweep.grid]\n{GRID}seed = [0, 1]",
    "sweep of one axis": "[sweep.grid]\nmax-num-seqs = [1, 3, 9]",
    "map": f'[map]\nmetric = "mean_ttft_ms"\n[map.grid]\n{GRID}',
    "map of goodput": f"[map.grid]\n{GRID}tp = [1, 2]",
    "tune": '[tune]\nslo = ["p99_ttft_ms:400"]\n[tune.grid]\nmax-num-seqs = [1, 64]',
    "tune for engines": '[tune]\ngoal = "cost"\nprice = 0.8\nslo = ["p99_ttft_ms:160"]',
}


WORKLOADS = ("fixed", "uniform", "azure-conv-2023", "sharegpt", "ramp", "burst", "sessions")


def commands() -> dict[str, tuple[str, ...]]:
    """Commands by name, one after another in a folder of their own."""
    slow = f"{SMALL} --workload fixed --input-len 300 --output-len 40 {PROFILE} --request-rate"
    trace = "trace generate sessions --num-prompts 40 --request-rate 3 --turns 3 --seed 2 -o t.jsonl"
    return {
        "run": (f"run --policy vllm-swap {CROWD} --out o --figures",),
        "run of cached turns": (f"run --policy vllm-v1 {TURNS} --out o --figures",),
        "run of pools": (f"run --policy mooncake {TURNS} {POOLS} --out o --figures",),
        "run of replicas": (f"run --policy vllm-v1 {TURNS} --replicas 2 --out o --figures",),
        "run of a disk": (f"run --policy cachedattention:disk-space=0.5 {TURNS} --out o",),
        "run of nothing": (f"run --policy vllm-swap {CROWD} --num-gpu-blocks-override 4 --out o --figures",),
        **{f"run of {length}": (f"run --policy vllm-swap {slow} {rate} --out o --figures --timeline", "report o")
           for length, rate in (("minutes", 0.02), ("hours", 0.0005))},
        "compare": (f"compare {TWO} {CROWD} --out o", "report o"),
        "report": (f"run --policy mooncake {TURNS} {POOLS} --out o --timeline", "report o"),
        "compare three": (f"compare {TWO} --policy vllm-v1 {TURNS} --out o --replicas 2",),
        **{f"explain {policy}": (f"run --policy {policy} {more} --out o --timeline",
                                 *(f"explain o --request {request}" for request in range(30)))
           for policy, more in (("vllm-swap", CROWD), ("layerkv", CROWD), ("adaptive", CROWD),
                                ("mooncake", f"{TURNS} {POOLS}"))},
        **{name: (f"{name.split()[0]} study.toml --out o --jobs 1",) for name in STUDIES},
        "trace": (trace, "trace list", "trace inspect t.jsonl", "trace convert t.jsonl -o t.csv --clip 600"),
        "workloads": tuple(f"trace generate {name} --num-prompts 9 --seed 3 -o {name}.jsonl" for name in WORKLOADS),
        "profile": (f"profile show {GOLDEN / 'l20-profile.json'}",
                    f"profile diff {GOLDEN / 'l20-profile.json'} {GOLDEN / 't4-profile.json'} --figure d.png"),
    }  # fmt: skip


def answer(study: str, *given: str) -> list[str]:
    """What commands tell and what they leave, as lines; `study` is in `study.toml`."""
    told, drawn = io.StringIO(), {}

    def keep(canvas: FigureCanvasAgg, file: Any, **_: object) -> None:
        path = Path(file if isinstance(file, str | Path) else file.name)
        drawn[path.name.split(".png")[0].strip(".")] = canvas.figure
        if not isinstance(file, str | Path):
            file.write(b"\x89PNG")

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(told),
        patch.object(FigureCanvasAgg, "print_png", keep),
        patch.dict(os.environ, {"COLUMNS": "110"}),
    ):
        Path("study.toml").write_text(study)
        for words in given:
            print(f"$ kvtwin {words.replace(str(GOLDEN), 'GOLDEN')}")
            try:
                print(f"exit status {kvtwin.main(words.split())}")
            except SystemExit as end:
                raise AssertionError(told.getvalue()) from end
        files = [line for path in sorted(Path().rglob("*")) if path.is_file() for line in left(path)]
    text = told.getvalue().replace(str(GOLDEN), "GOLDEN").splitlines()
    pictures: list[str] = []
    for name, figure in drawn.items():
        lines = picture(figure)
        pictures += [f"== {name}", *lines] if len(drawn) < 8 or "ttft" in name else [f"== {name} {digest(lines)}"]
    return [line.rstrip() for line in (*text, *files, *pictures)]


def left(path: Path) -> Iterator[str]:
    """A file's name, and what is in it where that is words."""
    if "points" in path.parts or path.name == "study.toml":
        return
    yield f"-- {path}"
    if path.suffix in (".csv", ".toml", ".jsonl") and path.name != "series.csv":
        text = re.sub(r"\b[0-9a-f]{64}\b", "KEY", path.read_text())
        for line in text.splitlines()[:60]:
            words = ",".join(str(rounded(number(word))) for word in line.split(",")).replace(str(GOLDEN), "GOLDEN")
            yield words if len(words) < 300 else f"{words[:200]} {digest(words)}"
    if path.suffix == ".html":
        words = re.sub(r"<(script|style).*?</\1>", "", path.read_text().replace(VERSION, "VERSION"), flags=re.S)
        yield f"its words {digest(words.replace(str(GOLDEN), 'GOLDEN'))}"
        for section in read_sections([path.parent]):
            for chart in charts(section.runs):
                numbers = digest(chart.data), digest(chart.layout)
                yield " ".join((f"chart {chart.name} {chart.title!r} {chart.caption!r}", *numbers))
                yield from map(repr, (chart.columns, *chart.rows))
    if path.name == "comparison.json":
        yield from json.dumps(rounded(json.loads(path.read_text())), indent=1).splitlines()


def number(word: str) -> object:
    """Of a cell."""
    try:
        return float(word) if "." in word else word
    except ValueError:
        return word


# -- pictures ----------------------------------------------------------------------------------------------------------


def picture(figure: Figure) -> list[str]:
    """A line for everything that is drawn."""
    return [line.rstrip() for line in _picture(figure)]


def _picture(figure: Figure) -> Iterator[str]:
    yield f"figure {short(figure.get_size_inches())} {figure.dpi:g} dpi"
    for artist in figure.get_children():
        yield from drawn_of(artist, figure.patch)


def drawn_of(artist: Artist, background: Artist) -> Iterator[str]:
    if artist is background or not artist.get_visible():
        return
    look = told_of(artist)
    if look:
        yield " ".join(look.split())
    if isinstance(artist, Axes):
        yield f"  {place_of(artist)}"
        for axis in (artist.xaxis, artist.yaxis):
            yield f"  {axis.axis_name} {axis_of(axis)}"
        for title in ("center", "left", "right"):
            if artist.get_title(loc=title):
                yield f"  title {title} {artist.get_title(loc=title)!r}"
    for child in artist.get_children():
        titles = isinstance(artist, Axes) and isinstance(child, Text) and child not in artist.texts
        if not isinstance(child, Axis) and not titles:
            yield from (f"  {line}" for line in drawn_of(child, getattr(artist, "patch", background)))


def place_of(axes: Axes) -> str:
    """In which rows and columns of the figure they are, how high and wide those are, and which edges are drawn."""
    spec, edges = axes.get_subplotspec(), [side for side, spine in axes.spines.items() if spine.get_visible()]
    if spec is None:
        return f"at {short(axes.get_position().bounds)} edges {edges}"
    grid = spec.get_gridspec()
    shape = f"rows {list(spec.rowspan)} of {grid.get_height_ratios()}, columns {list(spec.colspan)} of"
    return f"{shape} {grid.get_width_ratios()} edges {edges}"


def axis_of(axis: Axis) -> str:
    """Its scale, ends, name, and its ticks and how they write numbers where they were given."""
    ends, locator, words = short(axis.get_view_interval()), axis.get_major_locator(), axis.get_major_formatter()
    given = isinstance(locator, FixedLocator | LogLocator | NullLocator)
    ticks = f"{short(axis.get_ticklocs())} {[text.get_text() for text in axis.get_ticklabels()]}" if given else ""
    if type(locator) is MaxNLocator:
        ticks = f"at most so many: {short(locator.tick_values(0.0, 1.7))} or {short(locator.tick_values(0.0, 700.0))}"
    elif isinstance(words, FuncFormatter | StrMethodFormatter) and not isinstance(locator, FixedLocator):
        ticks += f" as {[words(value, 0) for value in (0.0, 0.0125, 7.0, 1234.5, 1e6)]}"
    look = axis.get_tick_params()
    grid, size = look.get("gridOn"), look.get("labelsize")
    between = "" if isinstance(axis.get_minor_formatter(), NullFormatter) else " have words"
    between = "" if isinstance(axis.get_minor_locator(), NullLocator) else f"ticks between{between}"
    return f"{axis.get_scale()} {ends} {axis.get_label_text()!r} grid {grid} size {size} {ticks} {between}"


def told_of(artist: Artist) -> str:
    """How an artist looks; empty where it only holds others."""
    match artist:
        case Legend():
            # Where it was asked to be: of the axes, or outside of them.
            anchor = short(artist.get_bbox_to_anchor().bounds) if artist._bbox_to_anchor else ""
            size = artist.prop.get_size_in_points()
            return f"legend {artist._loc_real} {anchor} {artist._ncols} columns {size:g} {artist.get_frame_on()}"
        case Text():
            text, colour = artist.get_text(), to_hex(artist.get_color(), keep_alpha=True)
            at, kind = short(artist.get_position()), type(artist).__name__
            more = f"{artist.get_fontsize():g} {artist.get_rotation():g} {artist.get_ha()} {artist.get_va()}"
            return f"{kind} {text!r} at {at} {colour} {more} {artist.get_fontweight()}" if text else ""
        case Line2D():
            marker = f"{artist.get_marker()} {artist.get_markersize():g}"
            style = f"{artist.get_linestyle()} {artist.get_linewidth():g} {artist.get_drawstyle()}"
            colour = to_hex(artist.get_color(), keep_alpha=True)
            return f"line {name_of(artist)} {colour} {artist.get_alpha()} {style} {marker} {short(artist.get_xydata())}"
        case Patch():
            colours = [to_hex(c, keep_alpha=True) for c in (artist.get_facecolor(), artist.get_edgecolor())]
            path = artist.get_patch_transform().transform_path(artist.get_path()).vertices
            return f"{type(artist).__name__} {name_of(artist)} {colours} {artist.get_linewidth():g} {short(path)}"
        case AxesImage():
            return f"image {short(artist.get_extent())} {short(artist.get_array())}"
        case Collection():
            paths = [path.vertices for path in artist.get_paths()]
            colours = [to_hex(c, keep_alpha=True) for c in (*artist.get_facecolor()[:9], *artist.get_edgecolor()[:9])]
            sizes = artist.get_sizes() if hasattr(artist, "get_sizes") else ()
            values = short([path.tolist() for path in paths]), short(artist.get_offsets()), short(sizes)
            return f"{type(artist).__name__} {name_of(artist)} {colours} {' '.join(values)}"
        case _:
            return "" if type(artist).__name__ in ("Spine", "Axis") else type(artist).__name__


def name_of(artist: Artist) -> str:
    name = str(artist.get_label())
    return repr("" if name.startswith("_") else name)


def short(values: Any) -> str:
    """Numbers, or a digest of them where they are many."""
    if isinstance(values, np.ma.MaskedArray):
        values = values.filled(np.nan)
    found = np.asarray(values).tolist() if not isinstance(values, list) else values
    text = json.dumps(five(found)).replace('"', "")
    return text if len(text) <= 90 else f"[{len(found)}] {digest(five(found))}"


def five(value: Any) -> Any:
    """With five digits of each number."""
    if isinstance(value, list | tuple):
        return [five(item) for item in value]
    return (f"{value:.5g}" if abs(value) > 1e-9 else "0") if isinstance(value, float) else value


def main() -> None:
    COMMANDS.mkdir(exist_ok=True)
    for name, given in commands().items():
        (COMMANDS / f"{name}.txt").write_text("\n".join(answer(STUDY + STUDIES.get(name, ""), *given)) + "\n")
        print(name)


if __name__ == "__main__":
    main()
