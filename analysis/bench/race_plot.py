"""The picture of the benchmark of all engines: for each model the speed of every entry, relative to one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from analysis.bench.results import BASE
from analysis.plots.style import BLUE, DARK, ORANGE, legend, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = ("gpipe", "myelin", "sbp")
SPEED = f"speed / {BASE}"
PIPELINES = ("torchgpipe", "torch_pipelining", "deepspeed, pipeline")
"""Prefixes of the names of other libraries' pipelines."""
PALE = "#BBBBBB"


@styled
def figure(rows: Sequence[dict[str, Any]]) -> Figure | None:
    """A panel for each model; a bar for each entry that finished, with the quartiles of its step time.

    The text in place of a bar is "refused" if the engine does not take the model, "failed" if it ended early.
    None if no row has a speed.
    """
    timed = [row for row in rows if SPEED in row]
    if not timed:
        return None
    models = list(dict.fromkeys(row["model"] for row in timed))
    names = list(dict.fromkeys(row["entry"] for row in timed))[::-1]
    drawn, axes = panels(1, len(models), 13, 0.32 * len(names) + 1.7, sharey=True)
    for panel, model in zip(axes[0], models, strict=True):
        for row in (row for row in timed if row["model"] == model):
            _bar(panel, row, names.index(row["entry"]))
        for row in (row for row in rows if row["model"] == model and SPEED not in row and row["entry"] in names):
            panel.text(0.03, names.index(row["entry"]), _why_not(row), va="center", fontsize=8, color=DARK)
        panel.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=model, xlabel=SPEED, xlim=(0, 1.25 * max(row[SPEED] for row in timed)))
        panel.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(range(len(names)), names)
    legend(drawn, {"Regatta": BLUE, "other libraries": ORANGE, "one device": PALE})
    return drawn


def headline(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """For each model a "figure", the speed of gpipe relative to the fastest pipeline of others, and a "text"."""
    headlines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        speeds = {row["entry"]: row[SPEED] for row in rows if row["model"] == model and SPEED in row}
        others = [name for name in speeds if name.startswith(PIPELINES)]
        if "gpipe" in speeds and others:
            best = max(others, key=lambda name: speeds[name])
            text = f"gpipe's speed on {model} / that of {best}, the fastest other pipeline"
            headlines.append({"figure": f"{speeds['gpipe'] / speeds[best]:.2f} x", "text": text})
    return headlines


def _bar(axes: Axes, row: dict[str, Any], place: int) -> None:
    speed = row[SPEED]
    slow, fast = (speed * row["step"] / seconds for seconds in reversed(row["quartiles"]))
    axes.barh(place, speed, color=_colour(row["entry"]), height=0.7)
    axes.plot([slow, fast], [place, place], color=DARK, linewidth=1)
    axes.text(max(speed, fast) + 0.03, place, f"{speed:.2f}", va="center", fontsize=8)


def _why_not(row: dict[str, Any]) -> str:
    return "failed" if "failed" in row else "refused"


def _colour(entry: str) -> str:
    if entry.startswith(BASE):
        return PALE
    return BLUE if entry in OURS else ORANGE
