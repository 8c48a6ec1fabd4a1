"""Figures 3 and 4: an attention layer's elements, and eight strategies in order of their communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from analysis.autoddl.sweep_results import Results, Row
from analysis.paper_data import value

ATTENTION = ("block_0.attention.qkv", "block_0.attention.projection")
FIG3 = ("Megatron", "AutoDDL", "found here")
"""Points of the sweep, in order."""
FLOAT_BYTES = 4
RANKING = "autoddl_fig4_ranking"
"""The file of what the paper says of Figure 4."""


def published(name: str) -> float | None:
    """Return the paper's number for what a device sends, in 2^30 elements."""
    return value("autoddl_fig3", "activation_communication_elements", scheme=name)


def elements(row: Row) -> float:
    """Return the elements that a device sends for the attention layer's matmuls in the forward pass; the backward pass
    mirrors it."""
    sent = (row.predicted["products"][name]["bytes"] for name in ATTENTION)
    return sum(size for own in sent for kind, size in own.items() if kind != "all_reduce") / 2 / FLOAT_BYTES


def fig3(results: Results) -> dict[str, Row]:
    """The points that were run, by name."""
    return {name: row for name, row in zip(FIG3, results.rows("fig3"), strict=True) if row.ok}


@dataclass(frozen=True)
class Ranked:
    """A strategy, and the seconds that a step communicates by prediction and by measurement."""

    title: str
    predicted_s: float
    measured_s: float


def fig4(results: Results, devices: int) -> list[Ranked]:
    """Eight strategies; none where one of them was not run. Measured is what a step spends in collectives."""
    rows = results.rows("fig4", lambda row: row["cluster.devices"] == str(devices))
    if not all(row.ok for row in rows):
        return []
    ranked = []
    for row in rows:
        metrics = row.record.metrics if row.record else {}
        title = row["planner.strategies"].strip("[]").replace("\\", "")
        ranked.append(Ranked(title, row.communication_s, metrics["collective_s"]))
    return sorted(ranked, key=lambda one: one.predicted_s)


def tau(ranked: Sequence[Ranked]) -> float:
    """Kendall's tau of predicted and measured: pairs in the same order less pairs in the other, as a share of those
    that the prediction does not hold for equal."""
    score = pairs = 0
    for one, other in combinations(ranked, 2):
        if abs(one.predicted_s - other.predicted_s) <= 1e-9 * other.predicted_s:
            continue
        pairs += 1
        score += 1 if (one.predicted_s < other.predicted_s) == (one.measured_s < other.measured_s) else -1
    return score / pairs if pairs else 0.0


def apart(ranked: Sequence[Ranked]) -> float:
    """Return the largest relative difference of predictions among pairs that were measured in another order."""
    wrong = (
        (one, other)
        for one, other in combinations(sorted(ranked, key=lambda one: one.predicted_s), 2)
        if one.measured_s > other.measured_s
    )
    return max((1 - one.predicted_s / other.predicted_s for one, other in wrong), default=0.0)
