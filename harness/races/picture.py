"""race.png: the speed of every entry relative to the first one, with its interval, and what was predicted.

gpipe      |================|-+-|    o          bar: measured, with the 95 % interval
ddp        |==========|-+-|   o                 ring: predicted
single     |=======|
           0       1        2                   speed / single
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import files

if TYPE_CHECKING:
    from harness.races.result import Result

BAR, DARK = "#0072B2", "#444444"
DPI = 100


@dataclass(frozen=True)
class Bar:
    """An entry: its speed relative to the reference, the ends of its interval, and the predicted speed."""

    title: str
    value: float
    low: float
    high: float
    predicted: float | None = None


def draw(result: Result, path: Path) -> None:
    """Draw a race, if an entry has finished."""
    if not result.reference:
        return
    expected = _predicted(result)
    bars = [
        Bar(f"{name}  ({result.places[name]})", found.value, found.low, found.high, expected.get(name))
        for name, found in result.ratios.items()
    ]
    write(bars, path, f"speed relative to {result.reference.name}, measured, with its 95 % interval", title(result))


def write(bars: Sequence[Bar], path: Path, label: str, heading: str) -> None:
    """Write the picture of some bars, the fastest above."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ordered = sorted(bars, key=lambda bar: bar.value)
    figure = Figure(figsize=(8, 1.6 + 0.36 * len(ordered)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, bar in enumerate(ordered):
        axes.barh(place, bar.value, color=BAR, height=0.6)
        axes.plot([bar.low, bar.high], [place, place], color=DARK, linewidth=2)
    rings = [(bar.predicted, place) for place, bar in enumerate(ordered) if bar.predicted is not None]
    if rings:
        axes.plot(*zip(*rings, strict=True), "o", markerfacecolor="white", markeredgecolor="#D55E00", label="predicted")
        figure.legend(loc="outside right lower", frameon=False)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(ordered)), [bar.title for bar in ordered])
    axes.set(xlabel=label, title=heading)
    axes.set_xlim(left=0)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    files.write_bytes(path, content.getvalue())


def _predicted(result: Result) -> dict[str, float]:
    """The predicted speed of each, relative to what the reference has measured."""
    base = result.finished[0].step_time_s
    return {name: base / step_s for name, step_s in result.predicted_s.items() if step_s}


def title(result: Result) -> str:
    """gpt, batch 16, 2 CPU devices"""
    record: Any = result.finished[0].row.record
    machine = (record.manifest.get("machine") or {}).get("cpu") or ""
    return f"{record.config['model']['name']}, batch {record.config['batch']['size']}\n{machine}"
