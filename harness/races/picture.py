"""race.png: the speed of every entry relative to the first one, with its interval, and what was predicted.

gpipe      |================|-+-|    o          bar: measured, with the 95 % interval
ddp        |==========|-+-|   o                 ring: predicted
single     |=======|
           0       1        2                   speed / single
"""

from __future__ import annotations

import io
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import files

if TYPE_CHECKING:
    from harness.races.result import Result

BAR, DARK = "#0072B2", "#444444"
DPI = 100


def draw(result: Result, path: Path) -> None:
    """Draw it, if an entry has finished."""
    if not result.reference:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = sorted(result.ratios, key=lambda name: result.ratios[name].value)
    figure = Figure(figsize=(8, 1.6 + 0.36 * len(names)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, name in enumerate(names):
        found = result.ratios[name]
        axes.barh(place, found.value, color=BAR, height=0.6)
        axes.plot([found.low, found.high], [place, place], color=DARK, linewidth=2)
    expected = _predicted(result)
    rings = [(expected[name], place) for place, name in enumerate(names) if name in expected]
    if rings:
        axes.plot(*zip(*rings, strict=True), "o", markerfacecolor="white", markeredgecolor="#D55E00", label="predicted")
        figure.legend(loc="outside right lower", frameon=False)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), [f"{name}  ({result.places[name]})" for name in names])
    axes.set(
        xlabel=f"speed relative to {result.reference.name}, measured, with its 95 % interval", title=_title(result)
    )
    axes.set_xlim(left=0)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    files.write_bytes(path, content.getvalue())


def _predicted(result: Result) -> dict[str, float]:
    """The predicted speed of each, relative to what the reference has measured."""
    base = statistics.median(result.finished[0].rounds_s)
    return {name: base / step_s for name, step_s in result.predicted_s.items() if step_s}


def _title(result: Result) -> str:
    """gpt, batch 16, 2 CPU devices"""
    record: Any = result.finished[0].row.record
    machine = (record.manifest.get("machine") or {}).get("cpu") or ""
    return f"{record.config['model']['name']}, batch {record.config['batch']['size']}\n{machine}"
