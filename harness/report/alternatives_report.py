"""Schedules side by side: a table, and a picture of step time against memory."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from harness.core import files
from harness.core.units import percent, seconds, size
from harness.report.schedule_files import kept_activations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

    from harness.planning.alternatives import Alternative

PICTURE = "schedules.png"
TITLES = ("schedule", "step time", "bubble", "peak memory", "kept activations", "sent", "")


def table(found: Sequence[Alternative]) -> Table:
    """Returns a row for each alternative: kept activations are the most micro-batches of its stages that a device keeps
    at once, sent the bytes of messages in a step."""
    made = Table(box=None, pad_edge=False)
    for title in TITLES:
        made.add_column(title, justify="left" if title in ("schedule", "") else "right")
    for one in found:
        made.add_row(*map(Text, _cells(one)))
    return made


def _cells(one: Alternative) -> list[str]:
    if one.draft is None:
        return [one.name, "", "", "", "", "", one.refused]
    kept = kept_activations(one.draft.simulation.trace)
    sent = sum(one.draft.simulation.figures["bytes_sent"].values())
    most = str(max(kept.values(), default=0))
    return [one.name, seconds(one.step_s), percent(one.bubble), size(one.peak_bytes), most, size(sent), one.refused]


def draw(found: Sequence[Alternative], path: Path) -> None:
    """Writes step time against peak memory, a point for each alternative, grey where it does not fit.

    Those to the lower left are better.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    places: dict[tuple[float, float], list[Alternative]] = defaultdict(list)
    for one in found:
        if one.draft:
            places[one.peak_bytes / 2**20, 1e3 * one.step_s].append(one)
    for place, equal in places.items():
        axes.plot(*place, "o", color="#999999" if equal[0].refused else "#0072B2")
    axes.set_xlabel("peak memory of the fullest device (MiB), predicted")
    axes.set_ylabel("step time (ms), predicted")
    axes.margins(x=0.15, y=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.draw_without_rendering()
    taken: list[Bbox] = []
    for place, equal in places.items():
        _label(axes, place, ", ".join(one.name for one in equal), taken)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    files.write_bytes(path, image.getvalue())


def _label(axes: Axes, place: tuple[float, float], name: str, taken: list[Bbox]) -> None:
    """Writes a name next to its point, where no name stands yet."""
    for offset, side in (((5, 4), "left"), ((5, -11), "left"), ((-5, 4), "right"), ((-5, -11), "right")):
        text = axes.annotate(name, place, xytext=offset, textcoords="offset points", fontsize=8.5, ha=side)
        box = text.get_window_extent()
        if not any(box.overlaps(other) for other in taken):
            break
        if side == "right" and offset[1] < 0:  # none is free
            break
        text.remove()
    taken.append(box)
