"""The report page's part on published against predicted figures: how many are near, a picture, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from analysis import cells, published
from analysis.cells import Group, Judged
from analysis.page.papers import Table, figure
from analysis.paper_pages import Picture
from analysis.plots.style import COLOURS, DARK, legend, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICKS = (0.125, 0.25, 0.5, 0.8, 1, 1.25, 2, 4, 8)
BAND = 1.25
"""The grey band reaches so far in both directions."""


def part(found: Mapping[str, Sequence[Judged]]) -> dict[str, Any]:
    """What the template shows; empty where no paper has a cell. `found` has the cells of each paper."""
    every = [one for own in found.values() for one in own]
    if not every:
        return {}
    drawn = ratios(found)
    return {
        "cards": [
            (share, f"cells within a factor {factor:g}; fitted ones left out")
            for factor, share in published.near(every).items()
        ],
        "figure": figure("published-ratios", "Predicted / published", Picture.of(drawn)) if drawn else None,
        "tables": [Table.of(one) for one in published.summary(found)],
        "cells": [Table.of(published.of_paper(paper, own)) for paper, own in found.items() if own],
    }


@styled
def ratios(found: Mapping[str, Sequence[Judged]]) -> Figure | None:
    """A line of dots for each table's quantity, coloured by paper, rings where a constant was fitted; a bar is the
    geometric mean. None if nothing is predicted."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    lines = [
        (paper, group)
        for paper, own in found.items()
        for group in cells.groups(own)
        if group.not_predicted < len(group.cells)
    ]
    if not lines:
        return None
    colours = dict(zip(found, COLOURS, strict=False))
    drawn, ((axes,),) = panels(1, 1, 12, 0.27 * len(lines) + 1.6)
    axes.axvspan(1 / BAND, BAND, color="#DDDDDD", alpha=0.5, zorder=0)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    for place, (paper, group) in enumerate(reversed(lines)):
        _dots(axes, group, place, colours[paper])
    axes.set(xscale="log", ylim=(-0.8, len(lines) - 0.2))
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_yticks(range(len(lines)), [f"{group.table}: {group.quantity}" for _, group in reversed(lines)])
    axes.set_xlabel(f"predicted / published (grey: within a factor {BAND:g}; bar: geometric mean; ring: fitted on)")
    axes.set_title("Every absolute figure of the papers' tables")
    legend(drawn, {paper: colours[paper] for paper, _ in lines})
    return drawn


def _dots(axes: Axes, group: Group, place: int, colour: str) -> None:
    for one in group.cells:
        if one.ratio:
            axes.scatter(
                one.ratio, place, 26, "none" if one.fitted else colour, edgecolors=colour, linewidths=1, alpha=0.8
            )
    if average := cells.mean(group.ratios):
        axes.plot([average, average], [place - 0.38, place + 0.38], color=DARK, linewidth=1.5)
