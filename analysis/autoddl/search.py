"""Figure 8: what the searches have found after so many plans, relative to the proven optimum."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from analysis.autoddl.rows import Results
from harness import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEARCHES = {
    "coordinate_descent": "coordinate descent",
    "metropolis_hastings": "Metropolis-Hastings",
    "random": "random",
}
COLOURS = {"coordinate_descent": "#0072B2", "metropolis_hastings": "#D55E00", "random": "#009E73"}
NODES, BATCHES = ("128", "4096"), ("1024", "256", "8192")
EVALUATIONS = 16_796
"""A hundredth of all plans on 128 nodes."""
BAND = (0.05, 0.95)
TICKS = (1, 2, 5, 10, 20, 50)
_WIDTH_IN, _HEIGHT_IN, _DPI = 12.0, 4.6, 100


@dataclass(frozen=True)
class Curve:
    """One search with one seed: (plans looked at, best cost so far / optimum) at every improvement."""

    points: tuple[tuple[int, float], ...]

    def at(self, plans: int) -> float:
        """The best of so many plans; infinite before the first."""
        return min((cost for count, cost in self.points if count <= plans), default=float("inf"))


def curves(results: Results, nodes: str, batch: str, search: str) -> list[Curve]:
    """One for each seed; none where the optimum, or a seed, was not run."""
    rows = results.rows("fig8", lambda row: row["cluster.nodes"] == nodes and row["batch.size"] == batch)
    best = next((row.communication_s for row in rows if row["planner.search"] == "exact" and row.ok), None)
    own = [row for row in rows if row["planner.search"] == search]
    if best is None or not all(row.ok for row in own):
        return []
    histories = (row.predicted["history"] for row in own)
    return [Curve(tuple((int(plans), seconds / best) for plans, seconds in history)) for history in histories]


def exhaustive(results: Results, batch: str) -> float | None:
    """Cost of the best of all plans on 128 nodes / the proven optimum."""
    rows = results.rows("fig8", lambda row: row["cluster.nodes"] == "128" and row["batch.size"] == batch)
    found = {row["planner.search"]: row.communication_s for row in rows if row.ok}
    return found["exhaustive"] / found["exact"] if {"exhaustive", "exact"} <= found.keys() else None


def middle(found: Sequence[Curve], plans: int) -> float:
    """The median over seeds."""
    return median(curve.at(plans) for curve in found)


def draw(results: Results, path: Path) -> bool:
    """Write the picture for a batch of 1024 to `path`; False if not all of it has been run.

    cost |\\__  random          a panel for each number of nodes; lines are medians of ten seeds, bands have nine
         |  \\____             of them in ten; 1 is the optimum
       1 |_______________
         +---------------- plans looked at, logarithmic
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = {(nodes, search): curves(results, nodes, BATCHES[0], search) for nodes in NODES for search in SEARCHES}
    if not all(found.values()):
        return False
    drawn = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(drawn)
    for axes, nodes in zip(drawn.subplots(1, len(NODES), sharey=True), NODES, strict=True):
        _panel(axes, nodes, {search: found[nodes, search] for search in SEARCHES})
    drawn.axes[0].set_ylabel("communication of the best plan / optimum")
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DPI)
    files.write_bytes(path, buffer.getvalue())
    return True


def _panel(axes: Axes, nodes: str, found: dict[str, list[Curve]]) -> None:
    first = max(curve.points[0][0] for own in found.values() for curve in own)
    plans = [first * (EVALUATIONS / first) ** (step / 100) for step in range(101)]
    for search, own in found.items():
        costs = [sorted(curve.at(round(count)) for curve in own) for count in plans]
        low, high = ([_quantile(one, share) for one in costs] for share in BAND)
        axes.fill_between(plans, low, high, color=COLOURS[search], alpha=0.2, linewidth=0)
        axes.plot(plans, [median(one) for one in costs], color=COLOURS[search], label=SEARCHES[search], linewidth=1.8)
    axes.axhline(1.0, color="black", linewidth=1.0, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("plans looked at")
    axes.set_title(f"{nodes} nodes")
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_yticks([], minor=True)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (place - lower) * (ordered[upper] - ordered[lower])
