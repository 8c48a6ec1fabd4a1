"""The picture of the benchmark of all engines: for each model the speed of every entry, relative to one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from analysis.bench.results import BASE, DEVICES
from analysis.plots.style import BLUE, DARK, ORANGE, legend, panels, styled, title
from harness.core.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = ("gpipe", "myelin", "sbp")
SPEED = f"speed / {BASE}"
PIPELINES = ("torchgpipe", "torch_pipelining", "deepspeed, pipeline")
"""Prefixes of the names of other libraries' pipelines."""
PALE = "#BBBBBB"
GROUND = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


@styled
def figure(rows: Sequence[dict[str, Any]], manifest: Mapping[str, Any] | None = None) -> Figure | None:
    """A panel for each model; a bar for each entry that finished, the fastest above, with quartiles of its step time.

    The text in place of a bar is "refused" if the engine does not take the model, "failed" if it ended early. The title
    names the machine of the `manifest`, that of a panel the batch. None if no row has a speed.
    """
    timed = [row for row in rows if SPEED in row]
    if not timed:
        return None
    names = {row["entry"] for row in timed}
    models = list(dict.fromkeys(row["model"] for row in timed))
    of_model = {name: _sorted(row for row in rows if row["model"] == name and row["entry"] in names) for name in models}
    highest = max(map(len, of_model.values()))
    drawn, axes = panels(1, len(models), max(7.0, 4.6 * len(models)), 0.3 * highest + 2.4)
    for panel, (model, own) in zip(axes[0], of_model.items(), strict=True):
        for place, row in enumerate(own):
            _entry(panel, row, place)
        panel.axvline(1.0, color="black", linewidth=0.8, linestyle=":", zorder=2.5)
        panel.set_yticks(range(len(own)), [row["entry"] for row in own])
        panel.set(title=_title(model, own), xlabel=f"speed relative to {BASE}")
        panel.set(xlim=(0, 1.45 * max(row[SPEED] for row in timed)), ylim=(len(own) - highest - 0.6, len(own) - 0.4))
        panel.grid(axis="y", visible=False)
    title(drawn, f"Training speed, and memory of the fullest device, measured{_machine(manifest)}")
    legend(drawn, {"Regatta": BLUE, "other libraries": ORANGE, "one device": PALE})
    return drawn


def _sorted(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the lowest place upwards: those without a speed, then from slow to fast."""
    return sorted(rows, key=lambda row: row.get(SPEED, 0.0))


def _title(model: str, rows: Sequence[dict[str, Any]]) -> str:
    """U-Net, below it: batch 16, micro-batches of 2"""
    of_batch = [f"\nbatch {row['batch']}, micro-batches of {row['micro-batch']}" for row in rows if "batch" in row]
    return model + "".join(of_batch[:1])


def _machine(manifest: Mapping[str, Any] | None) -> str:
    """: 2 CPU devices of a machine with 2 cores (Intel(R) Xeon(R) Processor)"""
    if not manifest:
        return ""
    if manifest["gpus"]:
        return f" on {DEVICES} GPUs ({manifest['gpus'][0]['name']})"
    machine = manifest["machine"]
    return f" on {DEVICES} CPU devices of a machine with {machine['cores_allowed']} cores ({machine['cpu']})"


def headline(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """For each model a "figure", the speed of gpipe relative to the fastest pipeline of a library, and a "text"."""
    headlines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        speeds = {row["entry"]: row[SPEED] for row in rows if row["model"] == model and SPEED in row}
        others = [name for name in speeds if name.startswith(PIPELINES)]
        if "gpipe" in speeds and others:
            best = max(others, key=lambda name: speeds[name])
            text = f"gpipe's speed on {model} / that of {best}, the fastest pipeline of a library"
            headlines.append({"figure": f"{speeds['gpipe'] / speeds[best]:.2f} x", "text": text})
    return headlines


def _entry(axes: Axes, row: dict[str, Any], place: int) -> None:
    """A bar with its speed and memory; in place of a bar why there is none."""
    if SPEED not in row:
        _write(axes, 0.0, place, "failed" if "failed" in row else "refused")
        return
    speed = row[SPEED]
    slow, fast = (speed * row["step"] / seconds for seconds in reversed(row["quartiles"]))
    axes.barh(place, speed, color=_colour(row["entry"]), height=0.7)
    axes.plot([slow, fast], [place, place], color=DARK, linewidth=1)
    memory = f"   {size(row['peak memory'])}" if "peak memory" in row else ""
    _write(axes, max(speed, fast), place, f"{speed:.2f}{memory}")


def _write(axes: Axes, x: float, place: int, text: str) -> None:
    """Right of x, on a white ground that covers the line of speed 1."""
    axes.text(x + 0.03, place, text, va="center", fontsize=8, color=DARK, zorder=3, bbox=GROUND)


def _colour(entry: str) -> str:
    if entry.startswith(BASE):
        return PALE
    return BLUE if entry in OURS else ORANGE
