"""Figure 8: what the searches have found after so many plans, and so much time, relative to the proven optimum.

All plans are looked at in two ways. One at a time, as the other searches do: the time of one plan is that of a random
one, from the same records. In blocks: as `planner.search=exhaustive` does, many times faster.
"""

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
SHARES = (1e-2, 1e-4)
"""Of all plans, and of the time to look at all of them: the paper's two to four orders of magnitude."""
PLANS = {"128": 36**4, "4096": 91**4}
"""All plans, by nodes."""


@dataclass(frozen=True)
class Curve:
    """Progress of one search with one seed: (plans evaluated, best cost so far / optimum) at every improvement, and the
    seconds that it had taken by then."""

    points: tuple[tuple[int, float], ...]
    elapsed_s: tuple[float, ...] = ()

    def at(self, plans: int) -> float:
        """The best of so many plans; infinite before the first."""
        return min((cost for count, cost in self.points if count <= plans), default=float("inf"))

    def after(self, seconds: float) -> float:
        """The best within so much time; infinite before the first, and where times are not known."""
        timed = zip(self.points, self.elapsed_s, strict=False)
        return min((cost for (_, cost), at_s in timed if at_s <= seconds), default=float("inf"))


def curves(results: Results, nodes: str, batch: str, search: str) -> list[Curve]:
    """Return a curve for each seed; none if the optimum, or a seed, was not run."""
    rows = results.rows("fig8", lambda row: row["cluster.nodes"] == nodes and row["batch.size"] == batch)
    best = next((row.communication_s for row in rows if row["planner.search"] == "exact" and row.ok), None)
    own = [row for row in rows if row["planner.search"] == search]
    if best is None or not all(row.ok for row in own):
        return []
    return [
        Curve(
            tuple((int(plans), seconds / best) for plans, seconds in row.predicted["history"]),
            tuple(row.predicted.get("elapsed_s", ())),
        )
        for row in own
    ]


def one_by_one_s(results: Results, nodes: str, batch: str) -> float | None:
    """Return the seconds to look at all plans one at a time: those of a random plan, median of the seeds, for each.

    None where times are not known."""
    rows = results.rows("fig8", lambda row: row["cluster.nodes"] == nodes and row["batch.size"] == batch)
    drawn = [row.predicted for row in rows if row["planner.search"] == "random" and row.ok]
    timed = [one["search_s"] / one["evaluations"] for one in drawn if "search_s" in one]
    return PLANS[nodes] * median(timed) if timed else None


def in_blocks_s(results: Results, batch: str) -> float | None:
    """Return the seconds of the exhaustive search on 128 nodes, which looks at plans in blocks."""
    rows = results.rows("fig8", lambda row: row["planner.search"] == "exhaustive" and row["batch.size"] == batch)
    return next((float(row.predicted["search_s"]) for row in rows if row.ok and "search_s" in row.predicted), None)


def exhaustive(results: Results, batch: str) -> float | None:
    """Cost of the best of all plans on 128 nodes / the proven optimum."""
    rows = results.rows("fig8", lambda row: row["cluster.nodes"] == "128" and row["batch.size"] == batch)
    seconds = {row["planner.search"]: row.communication_s for row in rows if row.ok}
    return seconds["exhaustive"] / seconds["exact"] if {"exhaustive", "exact"} <= seconds.keys() else None


def middle(of_seeds: Sequence[Curve], plans: int) -> float:
    """The median over seeds."""
    return median(curve.at(plans) for curve in of_seeds)


def middle_after(of_seeds: Sequence[Curve], seconds: float) -> float:
    """The median over seeds, within so much time."""
    return median(curve.after(seconds) for curve in of_seeds)
