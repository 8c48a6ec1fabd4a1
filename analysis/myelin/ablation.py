"""Ablation of each mechanism alone, which the paper does not print, from sweeps/myelin_ablation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from analysis.myelin.sweep_results import Results, Row
from analysis.report import MISSING, Section

IMBALANCES = ("none", "the head's", "a slow stage")
JITTERS = ("0", "0.1", "0.3")
STAGES = 12
BASE = "message-driven, fifo"
VARIANTS: dict[str, dict[str, str]] = {
    BASE: {"engine.policy": "fifo"},
    "forward_first": {"engine.policy": "forward_first"},
    "backward_first": {"engine.policy": "backward_first"},
    "alternate": {"engine.policy": "alternate"},
    "limit 6": {"engine.pipeline_limit": "6"},
    "limit 24": {"engine.pipeline_limit": "24"},
    "limit 48": {"engine.pipeline_limit": "48"},
    "1F1B": {"engine.order": "1f1b", "cluster.blocking_messages": ""},
    "GPipe": {"engine.order": "gpipe", "cluster.blocking_messages": ""},
    "blocking, message-driven": {"engine.order": "message_driven", "cluster.blocking_messages": "true"},
    "blocking, 1F1B": {"engine.order": "1f1b", "cluster.blocking_messages": "true"},
    "blocking, GPipe": {"engine.order": "gpipe", "cluster.blocking_messages": "true"},
}
"""Variants on 12 stages with a limit of 12, and the overrides that identify their points."""


@dataclass(frozen=True)
class Mechanism:
    """A line of the second table: one thing more than the line above."""

    title: str
    stages: int
    offload: bool
    k: int


MECHANISMS = (
    Mechanism("24 stages, state on the device", 24, False, 0),
    Mechanism("+ offloading", 24, True, 0),
    Mechanism("+ 12 stages", 12, True, 0),
    Mechanism("+ 6 stages", 6, True, 0),
    Mechanism("+ overlap of sums and updates, k = 4", 6, True, 4),
)


def variant_s(results: Results, variant: str, imbalance: str, jitter: str) -> float | None:
    """Seconds of the pipelining phase; None if it has not been run."""
    wanted = VARIANTS[variant]

    def own(row: Row) -> bool:
        same = all(row[key] == value for key, value in wanted.items())
        return (
            same
            and _stages(row) == STAGES
            and row["batch.size"] == "1024"
            and row["jitter"] == jitter
            and (_imbalance(row) == imbalance)
        )

    return _only(results, own, lambda row: row.phase_s("pipelining"))


def mechanism_s(results: Results, one: Mechanism, order: str, blocking: bool) -> float | None:
    """Seconds of a step."""
    wanted = {
        "engine.order": order,
        "cluster.blocking_messages": str(blocking).lower(),
        "engine.offload": str(one.offload).lower(),
        "engine.k": str(one.k),
        "batch.size": "2048",
    }
    return _only(
        results,
        lambda row: _stages(row) == one.stages and all(row[key] == value for key, value in wanted.items()),
        lambda row: row.step_s,
    )


def _only(results: Results, own: Callable[[Row], bool], figure: Callable[[Row], float]) -> float | None:
    """The figure of the one point that is so."""
    (row,) = results.rows("ablation", own)
    return figure(row) if row.ok else None


def _balance(row: Row) -> list[int]:
    return [int(number) for number in row["planner.balance"].strip("[]").split(",")]


def _stages(row: Row) -> int:
    return len(_balance(row))


def _imbalance(row: Row) -> str:
    if row["model.vocabulary"]:
        return "none"
    first, *_, last = _balance(row)
    return "the head's" if first == last else "a slow stage"


def sections(results: Results) -> list[Section]:
    """Return two tables, without those of which nothing was run."""
    if not results.good("ablation"):
        return []
    return [_orders(results), _mechanisms(results)]


def _orders(results: Results) -> Section:
    cases = [(imbalance, jitter) for imbalance in IMBALANCES for jitter in JITTERS]
    rows = []
    for variant in VARIANTS:
        cells = []
        for imbalance, jitter in cases:
            base, own = (variant_s(results, name, imbalance, jitter) for name in (BASE, variant))
            cells.append(_change(own, base, "{:.1f} s" if variant == BASE else ""))
        rows.append((variant, *cells))
    columns = ("pipelining phase", *(f"{imbalance}, {100 * float(jitter):.0f} %" for imbalance, jitter in cases))
    notes = (
        "Simulated: 12B on 48 GPUs, 12 stages and 4 replicas, batch 1024, micro-batch 1. Columns: imbalance, spread "
        "of the times of tasks. First line: seconds; others: by how much the phase is longer (+) or shorter (-).",
        "Imbalances: none (a head that costs nothing), the output head's on the last stage (0.7 blocks in addition to "
        "4), a stage of 6 blocks in the middle. The limit is 12 if none is named.",
        "With blocking messages both ends wait for a message, and compute nothing while it travels.",
    )
    return Section("What brings what: order, policy, limit and blocking messages", columns, tuple(rows), notes)


def _mechanisms(results: Results) -> Section:
    cases = [(order, blocking) for order in ("1f1b", "message_driven") for blocking in (True, False)]
    rows = []
    for number, one in enumerate(MECHANISMS):
        cells = []
        for case in cases:
            own = mechanism_s(results, one, *case)
            before = mechanism_s(results, MECHANISMS[number - 1], *case) if number else own
            cells.append(_seconds(own, before))
        rows.append((one.title, *cells))
    columns = ("step", *(f"{order.replace('_', '-')}{', blocking' if blocking else ''}" for order, blocking in cases))
    notes = (
        "Simulated: 12B on 48 GPUs, batch 2048, micro-batch 1; seconds of a step, and the change from the line above.",
    )
    return Section("What brings what: offloading, fewer stages, overlap", columns, tuple(rows), notes)


def _change(own: float | None, base: float | None, form: str) -> str:
    if own is None or base is None:
        return MISSING
    return form.format(own) if form else f"{100 * (own / base - 1):+.1f} %"


def _seconds(own: float | None, before: float | None) -> str:
    if own is None or before is None:
        return MISSING
    return f"{own:.1f}" + (f" ({100 * (own / before - 1):+.1f} %)" if own != before else "")
