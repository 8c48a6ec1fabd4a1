"""The race as a picture: for each model the speed of every contestant, relative to one device."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.bench.engines import BASE
from harness import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREY, ORANGE = "#0072B2", "#BBBBBB", "#E69F00"
"""Ours, one device, and the other libraries (Okabe and Ito's palette)."""
OURS = ("gpipe", "myelin", "sbp")
SPEED = f"speed / {BASE}"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write `figure(rows)` as a PNG."""
    buffer = io.BytesIO()
    figure(rows).savefig(buffer, format="png", dpi=100)
    files.write_bytes(path, buffer.getvalue())


def figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each model; a bar for each contestant that finished, with the quartiles of its step time.

    Raises ValueError where no row has a speed.
    """
    from matplotlib.figure import Figure

    timed = [row for row in rows if SPEED in row]
    if not timed:
        raise ValueError(f'none of {len(rows)} rows has "{SPEED}": there is nothing to draw')
    models = list(dict.fromkeys(row["model"] for row in timed))
    names = list(dict.fromkeys(row["contestant"] for row in timed))[::-1]
    drawn = Figure(figsize=(13, 0.32 * len(names) + 1.4), layout="constrained")
    panels = drawn.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        for row in (row for row in timed if row["model"] == model):
            _bar(axes, row, names.index(row["contestant"]))
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set(title=model, xlabel=SPEED, xlim=(0, 1.25 * max(row[SPEED] for row in timed)))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    return drawn


def _bar(axes: Axes, row: dict[str, Any], place: int) -> None:
    speed = row[SPEED]
    slow, fast = (speed * row["step"] / seconds for seconds in reversed(row["quartiles"]))
    axes.barh(place, speed, color=_colour(row["contestant"]), height=0.7)
    axes.plot([slow, fast], [place, place], color="black", linewidth=1)
    axes.text(max(speed, fast) + 0.03, place, f"{speed:.2f}", va="center", fontsize=8)


def _colour(contestant: str) -> str:
    if contestant.startswith(BASE):
        return GREY
    return BLUE if contestant in OURS else ORANGE
