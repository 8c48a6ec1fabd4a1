"""Lines that coincide are all visible, and more lines than colours have different looks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from analysis.plots import curves, style
from analysis.plots.curves import Line, coinciding, looks, overlay


def lines(*values: Sequence[float]) -> list[Line]:
    return [Line(range(len(y)), y, look) for y, look in zip(values, looks(len(values)), strict=True)]


def shares(axes: Axes, drawn: Sequence[Line]) -> list[float]:
    """Of each line: the share of its colour in the pixels that have any line's colour."""
    axes.axis("off")
    axes.figure.canvas.draw()  # type: ignore[attr-defined]
    pixels = np.asarray(axes.figure.canvas.buffer_rgba())[..., :3] / 255  # type: ignore[attr-defined]
    counts = [(np.abs(pixels - to_rgb(line.look.colour)).max(axis=2) < 0.02).sum() for line in drawn]
    return [count / sum(counts) for count in counts]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_each_of_equal_lines_is_visible(count: int) -> None:
    """Drawn one on the other, the last one would have all pixels."""
    drawn = lines(*[[3.0, 1.0, 2.0, 0.0]] * count)
    axes = style.panels(1, 1, 8, 5)[1][0, 0]
    overlay(axes, drawn)
    assert min(shares(axes, drawn)) > 0.6 / count


def test_a_line_is_whole_where_it_leaves_the_others() -> None:
    drawn = lines([4.0, 3.0, 2.0, 1.0], [9.0, 3.0, 2.0, 1.0])
    axes = style.panels(1, 1, 8, 5)[1][0, 0]
    overlay(axes, drawn)
    first, pieces, whole = axes.get_lines()
    assert first.get_linestyle() == whole.get_linestyle() == "-" and pieces.get_linestyle() == "--"
    assert str(whole.get_ydata().tolist()) == "[9.0, 3.0, nan, nan]"


def test_lines_coincide_where_two_points_in_turn_do() -> None:
    equal, near, apart = [4.0, 3.0, 2.0, 0.0], [4.0, 3.0, 2.001, 0.0], [5.0, 4.0, 3.0, 0.0]
    assert coinciding(lines(equal, apart, near)) == [[0, 2], [1]]
    assert coinciding(lines(equal, [4.0, 3.0])) == [[0, 1]], "of points that both have"
    assert coinciding(lines(equal, [math.inf, math.nan, math.nan, 0.0])) == [[0, 1]]
    assert coinciding(lines([1e-9, 1.0], [1e-6, 1.0], [1e-6, 1e-9])) == [[0, 1], [2]]
    assert coinciding(lines([1e-9, 1e-9, 1.0], [1e-6, 1e-6, 1.0]), logarithmic=True) == [[0], [1]]
    one, both, other = [9.0, 1.0, 1.0, 5.0], [9.0, 1.0, 8.0, 7.0], [0.0, 5.0, 8.0, 7.0]
    assert coinciding(lines(one, both, other)) == [[0, 1, 2]] and coinciding(lines(one, other)) == [[0], [1]]
    assert coinciding([]) == [] and coinciding(lines([])) == [[0]]


def test_dashes_are_not_drawn_twice_where_a_line_is_alone() -> None:
    first, other = lines([4.0, 3.0, 2.0, 1.0, 1.0], [9.0, 9.0, 9.0, 1.0, 1.0])
    axes = style.panels(1, 1, 8, 5)[1][0, 0]
    overlay(axes, [first, Line(other.x, other.y, curves.Look(style.BLUE, "dotted"))])
    _, pieces, whole = axes.get_lines()
    assert str(pieces.get_ydata().tolist()) == "[nan, nan, 9.0, 1.0, 1.0]"
    assert str(whole.get_ydata().tolist()) == "[9.0, 9.0, 9.0, 1.0, nan]"


def test_28_lines_have_different_looks() -> None:
    assert len(set(looks(28))) == 28
    assert {look.dash for look in looks(7)} == {"solid"}
    assert all(sum(pattern) == curves.PIECE for pattern in curves.PATTERNS.values())


def test_marks_of_equal_lines_are_rings_and_lonely_points_have_one() -> None:
    axes = style.panels(1, 1, 4, 3)[1][0, 0]
    overlay(axes, lines([1.0, 2.0], [1.0, 2.0]), marked=True)
    _, outer, _, inner = axes.get_lines()
    assert outer.get_markersize() > inner.get_markersize() and outer.get_markevery() == [0, 1]
    axes = style.panels(1, 1, 4, 3)[1][0, 0]
    overlay(axes, lines([1.0, math.nan, 2.0, 3.0]))
    assert axes.get_lines()[1].get_markevery() == [0]
