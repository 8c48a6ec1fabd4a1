"""Figure 8: what the searches have found after so many plans, relative to the proven optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from analysis.autoddl.sweep_results import Results

FILE = "autoddl_fig8_search"
"""File of the paper's numbers for Figure 8."""
SEARCHES = {
    "coordinate_descent": "coordinate descent",
    "metropolis_hastings": "Metropolis-Hastings",
    "random": "random",
}
NODES, BATCHES = ("128", "4096"), ("1024", "256", "8192")
CLAIMED = ("128", "1024")
"""Nodes and batch of claim AD-6."""
EVALUATIONS = 16_796
"""A hundredth of all plans on 128 nodes."""


@dataclass(frozen=True)
class Curve:
    """Progress of one search with one seed: (plans evaluated, best cost so far / optimum) at every improvement."""

    points: tuple[tuple[int, float], ...]

    def at(self, plans: int) -> float:
        """The best of so many plans; infinite before the first."""
        return min((cost for count, cost in self.points if count <= plans), default=float("inf"))


def curves(results: Results, nodes: str, batch: str, search: str) -> list[Curve]:
    """Return a curve for each seed; none if the optimum, or a seed, was not run."""
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
    seconds = {row["planner.search"]: row.communication_s for row in rows if row.ok}
    return seconds["exhaustive"] / seconds["exact"] if {"exhaustive", "exact"} <= seconds.keys() else None


def middle(of_seeds: Sequence[Curve], plans: int) -> float:
    """The median over seeds."""
    return median(curve.at(plans) for curve in of_seeds)
