"""How values of each source are drawn, the one legend, and files that are the same every time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from analysis.plots import style
from analysis.plots.style import BLUE, Bars


@style.styled
def drawn() -> Figure:
    figure, axes = style.panels(1, 2, 6, 3)
    style.bars(axes[0, 0], ["a", "b"], [
        Bars([1.0, None], BLUE, "paper"), Bars([2.0, 3.0], BLUE), Bars([4.0, 5.0], BLUE, "measured")
    ])  # fmt: skip
    for source in style.LOOKS:
        style.line(axes[0, 1], [1, 2, 3], [1.0, math.inf, 3.0], BLUE, source)
    style.legend(figure, {"ours": BLUE}, [*style.LOOKS])
    return figure


def test_sources_differ_in_their_look_and_share_their_colour() -> None:
    bars, lines = drawn().axes
    looks = [(bar.get_hatch(), bar.get_alpha()) for bar in bars.patches[::2]]
    assert len({*looks}) == 3
    assert looks[1] == ("", 1.0)
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines.get_lines()}) == 3
    assert {to_hex(line.get_color()) for line in lines.get_lines()} == {BLUE.lower()}


def test_bars_are_side_by_side_with_their_values_above() -> None:
    bars = drawn().axes[0]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in bars.patches]
    assert [round(one - centres[2], 6) for one in centres] == [-0.28, 0.72, 0.0, 1.0, 0.28, 1.28]
    assert [text.get_text() for text in bars.texts] == ["1", "", "2", "3", "4", "5"]
    assert [text.get_text() for text in bars.get_xticklabels()] == ["a", "b"]


def test_an_infinite_value_is_a_gap() -> None:
    values = drawn().axes[1].get_lines()[0].get_ydata()
    assert [math.isnan(value) for value in values] == [False, True, False]


def test_there_is_one_legend_of_colours_and_sources() -> None:
    figure = drawn()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ours", "paper", "simulated", "measured"]
    assert len(figure.legends) == 1 and not any(axes.get_legend() for axes in figure.axes)


def test_the_legend_is_not_wider_than_the_figure(tmp_path: Path) -> None:
    figure, _ = style.panels(1, 1, 6, 3)
    style.legend(figure, {f"quite a long name of the scheme {number}": BLUE for number in range(6)})
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width


@pytest.mark.usefixtures("computation")
def test_every_figure_that_was_run_becomes_a_png_and_a_pdf(tmp_path: Path) -> None:
    figures = {"one": lambda results: drawn() if results else None, "two": lambda results: None}
    assert style.save(figures, True, tmp_path) == ["one"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.pdf", "one.png"]
    with Image.open(tmp_path / "one.png") as image:
        assert image.size == (600, 300)
    before = (tmp_path / "one.pdf").read_bytes()
    style.write(drawn(), tmp_path / "one.pdf")
    assert (tmp_path / "one.pdf").read_bytes() == before


def test_links_to_what_was_drawn(tmp_path: Path) -> None:
    assert style.drawn({"one": lambda results: drawn()}, None, tmp_path) == "As pictures: [one](figures/one.png)."
    assert style.drawn({"one": lambda results: None}, None, tmp_path) == ""
