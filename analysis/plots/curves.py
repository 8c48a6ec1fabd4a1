"""Lines that lie on one another, drawn so that each is visible, and looks for more lines than there are colours.

    coinciding    ====----....====----....    the first line, and on it pieces of the others in turn
    apart         ========================    a line alone is whole
                  ------------------------

A line's look is a colour and a pattern of dashes; both are those of its handle in the legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from analysis.plots.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

Dash = Literal["solid", "dashed", "dotted", "dash-dotted"]
PIECE = 9.0
"""Length of a piece of a coinciding line, in its widths. Each pattern below is as long."""
PATTERNS: dict[Dash, tuple[float, ...]] = {
    "solid": (PIECE, 0.0),
    "dashed": (3.0, 1.5) * 2,
    "dotted": (1.0, 1.25) * 4,
    "dash-dotted": (4.5, 1.5, 1.5, 1.5),
}
"""Lengths on and off in turn, in widths of the line."""
WIDTH_PT = 2.0
NEAR = 0.006
"""Two lines coincide where they are as near as this share of all lines' height."""
_RING_PT = 2.5
"""By so much a mark is wider than the next one on it."""


@dataclass(frozen=True)
class Look:
    """How a line differs from the others."""

    colour: str
    dash: Dash = "solid"


@dataclass(frozen=True)
class Line:
    """A line through the points (x, y), with x rising; where y is infinite or NaN it has a gap."""

    x: Sequence[float]
    y: Sequence[float]
    look: Look


def looks(count: int) -> list[Look]:
    """`count` looks, the first 28 of them different: all colours with solid lines, then with dashes."""
    dashes = list(PATTERNS)
    return [Look(COLOURS[one % len(COLOURS)], dashes[one // len(COLOURS) % len(dashes)]) for one in range(count)]


def handle(label: str, look: Look) -> Artist:
    """A handle for `style.below`: what the lines of a look mean."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=look.colour, linestyle=_dashes(look.dash, 0, 1), linewidth=WIDTH_PT, label=label)


def overlay(axes: Axes, lines: Sequence[Line], marked: bool = False) -> None:
    """Draw all lines; `axes` has its scale of y already. `marked` puts a mark at each point, else at lonely ones only.

    A line in pieces is whole where it leaves the others of its group. Marks of coinciding lines are rings, one in the
    other.
    """
    logarithmic = axes.get_yscale() == "log"
    near = _near(lines, logarithmic)
    for group in coinciding(lines, logarithmic):
        for place, number in enumerate(group):
            line = lines[number]
            y = np.where(np.isfinite(line.y), line.y, math.nan)
            covers = np.any([_on(line, lines[other], near, logarithmic) for other in group[:place]], axis=0)
            _draw(axes, line, y, place, len(group), covers)
            if marks := list(range(len(y))) if marked else _lonely(y):
                size = 2 * WIDTH_PT + _RING_PT * (len(group) - 1 - place)
                look: dict[str, Any] = {"color": line.look.colour, "markersize": size, "markeredgewidth": 0}
                axes.plot(line.x, y, "o", markevery=marks, **look)


def _draw(axes: Axes, line: Line, y: np.ndarray, place: int, count: int, covers: np.ndarray) -> None:
    """Draw line `place` of `count`: whole, but for parts between points that cover earlier lines, which are pieces."""
    look: dict[str, Any] = {"color": line.look.colour, "linewidth": WIDTH_PT}
    whole = _dashes(line.look.dash, 0, 1)
    if not place:
        axes.plot(line.x, y, linestyle=whole, **look)
        return
    alone = ~covers & np.isfinite(y)
    solid = line.look.dash == "solid"  # pieces of the whole path: they do not begin again after each part
    axes.plot(line.x, y if solid else _with_ends(covers, y), linestyle=_dashes(line.look.dash, place, count), **look)
    if alone.any():
        axes.plot(line.x, _with_ends(alone, y), linestyle=whole, **look)


def _with_ends(chosen: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The values at the chosen points and next to them, else NaN."""
    kept = chosen | np.append(chosen[1:], False) | np.append(False, chosen[:-1])
    return np.where(kept, y, math.nan)


def coinciding(lines: Sequence[Line], logarithmic: bool = False) -> list[list[int]]:
    """The numbers of the lines in groups of those that coincide somewhere; one that is alone is a group of one."""
    near = _near(lines, logarithmic)
    groups: list[list[int]] = []
    for number, line in enumerate(lines):
        for group in groups:
            if any(_coincide(line, lines[other], near, logarithmic) for other in group):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def _coincide(line: Line, other: Line, near: float, logarithmic: bool) -> bool:
    """Whether the line from one point to the next is on the other one, or the only point that both have."""
    on = _on(line, other, near, logarithmic)
    return bool((on[:-1] & on[1:]).any() or on.sum() == np.isin(_drawn_x(line), _drawn_x(other)).sum() == 1)


def _drawn_x(line: Line) -> np.ndarray:
    return np.asarray(line.x)[np.isfinite(line.y)]


def _near(lines: Sequence[Line], logarithmic: bool) -> float:
    """How far apart two lines may be that coincide, in the panel's own heights."""
    heights = np.concatenate([np.zeros(0), *(_heights(line.y, logarithmic) for line in lines)])
    finite = heights[np.isfinite(heights)]
    return NEAR * float(np.ptp(finite)) if finite.size else 0.0


def _on(line: Line, other: Line, near: float, logarithmic: bool) -> np.ndarray:
    """For each point of a line whether it is on the other one."""
    found = np.zeros(len(line.x), dtype=bool)
    _, own, others = np.intersect1d(line.x, other.x, return_indices=True)
    apart = np.abs(_heights(line.y, logarithmic)[own] - _heights(other.y, logarithmic)[others])
    found[own] = apart <= near
    return found


def _heights(y: Sequence[float], logarithmic: bool) -> np.ndarray:
    """Places on the axis; NaN for what it does not show."""
    values = np.asarray(y, dtype=float)
    shown = np.isfinite(values) & ((values > 0) | (not logarithmic))
    places = np.full(values.shape, np.nan)
    places[shown] = np.log10(values[shown]) if logarithmic else values[shown]
    return places


def _dashes(dash: Dash, place: int, count: int) -> Literal["-"] | tuple[float, tuple[float, ...]]:
    """The pattern of line `place` of `count` that coincide: the first is whole, others have every `count`-th piece."""
    if place == 0:
        count = 1
    if dash == "solid" and count == 1:
        return "-"
    *pattern, last = PATTERNS[dash]
    return PIECE * ((count - place) % count), (*pattern, last + PIECE * (count - 1))


def _lonely(y: np.ndarray) -> list[int]:
    """Points without a neighbour, of which a line shows nothing."""
    padded = [math.nan, *y, math.nan]
    return [
        number
        for number, (before, here, after) in enumerate(zip(padded, padded[1:], padded[2:], strict=False))
        if math.isfinite(here) and not math.isfinite(before) and not math.isfinite(after)
    ]
