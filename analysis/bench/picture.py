"""The race as a picture: for each model the speed of every contestant, relative to one device."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.bench.engines import BASE
from harness import files

BLUE, GREY, ORANGE = "#0072B2", "#BBBBBB", "#E69F00"
"""Ours, one device, and the other libraries (Okabe and Ito's palette)."""
OURS = ("gpipe", "myelin", "sbp")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each model; a bar for each contestant that took part, with the quartiles of its step time."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if "step" in row]
    models = list(dict.fromkeys(row["model"] for row in timed))
    names = list(dict.fromkeys(row["contestant"] for row in timed))[::-1]
    figure = Figure(figsize=(13, 0.32 * len(names) + 1.4), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        for row in (row for row in timed if row["model"] == model):
            speed, place = row[f"speed / {BASE}"], names.index(row["contestant"])
            slow, fast = (speed * row["step"] / seconds for seconds in reversed(row["quartiles"]))
            axes.barh(place, speed, color=_colour(row["contestant"]), height=0.7)
            axes.plot([slow, fast], [place, place], color="black", linewidth=1)
            axes.text(max(speed, fast) + 0.03, place, f"{speed:.2f}", va="center", fontsize=8)
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set(title=model, xlabel="speed / single", xlim=(0, 1.25 * max(r[f"speed / {BASE}"] for r in timed)))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    files.write_bytes(path, buffer.getvalue())


def _colour(contestant: str) -> str:
    if contestant.startswith("single"):
        return GREY
    return BLUE if contestant in OURS else ORANGE
