"""What is in a picture before anything is laid out: its words, lines, bars, colours and axes, a line for each."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
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
from pinned import digest, rounded


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
    text = json.dumps(rounded(found, 5)).replace('"', "")
    return text if len(text) <= 90 else f"[{len(found)}] {digest(rounded(found, 5))}"
