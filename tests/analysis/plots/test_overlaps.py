"""No text of a picture overlaps another one, or is cut: all pictures of the committed records."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from analysis import paper_pages, scheme_comparison
from analysis.bench import race_plot, results
from analysis.plots.style import panels

TOUCHING_PX = 2.0


def overlaps(figure: Figure) -> list[tuple[str, ...]]:
    """Texts that overlap, and those beyond the figure's edges."""
    canvas: Any = figure.canvas
    canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in _drawn(figure)]
    cut = [(text,) for text, box in boxes if not _within(box, figure.bbox)]
    return [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if _shared(a, b)] + cut


def _drawn(figure: Figure) -> Iterator[Text]:
    """But for the labels of ticks beyond their axis, which are not drawn."""
    ticks = {id(label): axes for axes in figure.axes for label in _labels(axes)}
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        box = text.get_window_extent()
        x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        axes = ticks.get(id(text))
        within = axes is None or (
            axes.bbox.x0 - 1 <= x <= axes.bbox.x1 + 1 or axes.bbox.y0 - 1 <= y <= axes.bbox.y1 + 1
        )
        if text.get_visible() and text.get_text().strip() and within:
            yield text


def _labels(axes: Axes) -> Iterator[Text]:
    yield from chain(axes.get_xticklabels(which="both"), axes.get_yticklabels(which="both"))


def _within(box: Bbox, edges: Bbox) -> bool:
    return bool(box.x0 >= -1 and box.y0 >= -1 and box.x1 <= edges.x1 + 1 and box.y1 <= edges.y1 + 1)


def _shared(one: Bbox, other: Bbox) -> bool:
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return bool(min(wide, high) > TOUCHING_PX)


def test_overlaps_are_found() -> None:
    figure, axes = panels(1, 1, 4, 3)
    axes[0, 0].text(0.5, 0.5, "one")
    axes[0, 0].text(0.51, 0.51, "other")
    assert overlaps(figure) == [("one", "other")]
    axes[0, 0].texts[0].set_position((0.1, 0.1))
    assert overlaps(figure) == []
    axes[0, 0].texts[0].set_position((3.0, 0.1))
    axes[0, 0].texts[0].set_in_layout(False)
    assert overlaps(figure) == [("one",)]


@pytest.mark.usefixtures("computation", "at_length")
@pytest.mark.parametrize("paper", paper_pages.PAGES)
def test_of_papers(paper: str) -> None:
    report = paper_pages.report(paper)
    drawn = {name: draw(report.results) for name, draw in report.page.figures.items()}
    assert all(drawn.values())
    assert {name: found for name, figure in drawn.items() if figure and (found := overlaps(figure))} == {}


@pytest.mark.parametrize("source", ["simulated", "measured"])
def test_of_all_schemes(source: Any) -> None:
    figure = scheme_comparison.figure(source)
    assert figure and overlaps(figure) == []


def test_of_the_race() -> None:
    race = results.load()["race"]
    figure = race_plot.figure(race["rows"], race["manifest"])
    assert figure and overlaps(figure) == []
