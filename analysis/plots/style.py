"""The style of every picture: one palette, one look for each source of a value, one legend; PNG and PDF.

Colour shows whose a value is (a scheme, a framework, a phase). The look shows its source: what a paper
prints is pale and hatched, its lines are dashed; simulated and planned is full, lines are solid; measured is dotted.
"""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from harness.core import files

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Source = Literal["paper", "simulated", "measured"]
Dash = Literal["-", "--", ":"]
Given = ParamSpec("Given")
Drawn = TypeVar("Drawn")
Results = TypeVar("Results")

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito's palette, which colour-blind readers can distinguish; the first one is ours."""
BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW = COLOURS
GREY, DARK = "#999999", "#444444"
DPI = 100
_BARS, _LABEL_PT = 0.84, 7.5
_LETTERS_IN, _HANDLE_LETTERS, _TITLE_LETTERS_IN, _LINE_IN = 13, 7, 11, 0.2
"""Letters of a legend in an inch, how many a handle takes, letters of a title in an inch, and a legend's line."""


@dataclass(frozen=True)
class Look:
    """Look of the values of one source: bars by `alpha` and `hatch`, lines by `dash` and `marker`."""

    alpha: float
    hatch: str
    dash: Dash
    marker: str


LOOKS: dict[Source, Look] = {
    "paper": Look(0.4, "////", "--", "D"),
    "simulated": Look(1.0, "", "-", "o"),
    "measured": Look(0.75, "....", ":", "s"),
}


@dataclass(frozen=True)
class Bars:
    """One bar in each group; None leaves its place empty."""

    values: Sequence[float | None]
    colour: str
    source: Source = "simulated"


def styled(draw: Callable[Given, Drawn]) -> Callable[Given, Drawn]:
    """Makes what `draw` draws look like all others."""

    @functools.wraps(draw)
    def inside(*arguments: Given.args, **named: Given.kwargs) -> Drawn:
        import matplotlib
        import seaborn

        theme = seaborn.axes_style("whitegrid", {"axes.spines.top": False, "axes.spines.right": False})
        sizes = {
            "font.size": 10,
            "axes.titlesize": 10.5,
            "axes.labelsize": 10,
            "legend.fontsize": 9.5,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "hatch.linewidth": 0.6,
            "grid.linewidth": 0.6,
            "lines.linewidth": 1.7,
            "lines.markersize": 4.5,
        }
        with matplotlib.rc_context(theme | sizes):
            return draw(*arguments, **named)

    return inside


def panels(
    rows: int, columns: int, width_in: float, height_in: float, **options: Any
) -> tuple[Figure, np.ndarray[Any, Any]]:
    """An empty figure and its axes, an array (rows, columns)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def bars(axes: Axes, groups: Sequence[str], series: Sequence[Bars], form: str = "{:.3g}") -> None:
    """A bar of each series in each group, with its value above it."""
    width = _BARS / len(series)
    for number, one in enumerate(series):
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        heights = [math.nan if value is None else value for value in one.values]
        drawn = axes.bar(places, heights, width, edgecolor="white", linewidth=0.5, **_filled(one.colour, one.source))
        labels = ["" if value is None else form.format(value) for value in one.values]
        axes.bar_label(drawn, labels, padding=1.5, fontsize=_LABEL_PT)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)


def rows(axes: Axes, names: Sequence[str], values: Sequence[float], colour: str, source: Source = "simulated") -> None:
    """A horizontal bar for each name, the first one at the bottom, with its value next to it."""
    drawn = axes.barh(list(names), list(values), _BARS, edgecolor="white", linewidth=0.5, **_filled(colour, source))
    axes.bar_label(drawn, [f"{value:.3g}" for value in values], padding=2, fontsize=_LABEL_PT)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12, y=0.01)


def line(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, source: Source = "simulated") -> None:
    """A line with a mark at each point; where a value is infinite or NaN it has a gap."""
    shown = [value if math.isfinite(value) else math.nan for value in y]
    axes.plot(x, shown, **_marked(colour, source))


def legend(figure: Figure, colours: Mapping[str, str], sources: Sequence[Source] = (), lines: bool = False) -> None:
    """The figure's only legend, below it: what colours mean, and in grey how the sources of bars or lines look."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [filled(name, colour) for name, colour in colours.items()]
    for source in sources:
        if lines:
            handles.append(Line2D([], [], label=source, **_marked(DARK, source)))
        else:
            handles.append(Patch(label=source, edgecolor="white", linewidth=0.5, **_filled(DARK, source)))
    below(figure, handles)


def title(figure: Figure, text: str) -> None:
    """The figure's title, in lines that are not wider than the figure; in users' own words "$" is no formula."""
    if text:
        width = int(figure.get_figwidth() * _TITLE_LETTERS_IN)
        figure.suptitle(textwrap.fill(text, width), parse_math=False)


def below(figure: Figure, handles: Sequence[Artist], grow: bool = False) -> None:
    """A legend of these handles, below the figure; in users' own labels "$" is no formula.

    `grow` makes the figure higher by what the legend has more than one line, so that its panels stay as high.
    """
    letters = int(figure.get_figwidth() * _LETTERS_IN)
    for handle in handles:
        handle.set_label(textwrap.fill(str(handle.get_label()), letters - _HANDLE_LETTERS))
    labels = [str(handle.get_label()).splitlines() for handle in handles]
    longest = max((len(line) for label in labels for line in label), default=0)
    lines = math.ceil(len(handles) / max(1, letters // (longest + _HANDLE_LETTERS)))
    if handles:
        columns = math.ceil(len(handles) / lines)
        drawn = figure.legend(handles=list(handles), loc="outside lower center", ncols=columns, frameon=False)
        for text in drawn.get_texts():
            text.set_parse_math(False)
        if grow:
            figure.set_figheight(figure.get_figheight() + _LINE_IN * (lines * max(map(len, labels)) - 1))


def filled(label: str, colour: str) -> Artist:
    """A handle for `below`: what bars of a colour mean."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def lined(label: str, colour: str, dash: Dash) -> Artist:
    """A handle for `below`: what lines of a kind mean."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=dash, label=label)


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or PDF, by the path's suffix; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    undated = {"CreationDate": None} if path.suffix == ".pdf" else {}
    figure.savefig(buffer, format=path.suffix.removeprefix("."), dpi=figure.dpi, metadata=undated)
    files.write_bytes(path, buffer.getvalue())


def save(figures: Mapping[str, Callable[[Results], Figure | None]], results: Results, folder: Path) -> list[str]:
    """Write each figure that has been run as NAME.png and NAME.pdf; returns their names."""
    saved = []
    for name, draw in figures.items():
        figure = draw(results)
        if figure is not None:
            write(figure, folder / f"{name}.png")
            write(figure, folder / f"{name}.pdf")
            saved.append(name)
    return saved


def drawn(figures: Mapping[str, Callable[[Results], Figure | None]], results: Results, folder: Path) -> str:
    """`save` into FOLDER/figures, and a line of Markdown with links to what was drawn; empty if nothing was."""
    links = [f"[{name}](figures/{name}.png)" for name in save(figures, results, folder / "figures")]
    return f"As pictures: {', '.join(links)}." if links else ""


def _filled(colour: str, source: Source) -> dict[str, Any]:
    look = LOOKS[source]
    return {"facecolor": colour, "alpha": look.alpha, "hatch": look.hatch}


def _marked(colour: str, source: Source) -> dict[str, Any]:
    look = LOOKS[source]
    face = "white" if source == "paper" else colour
    return {"linestyle": look.dash, "marker": look.marker, "color": colour, "markerfacecolor": face}
