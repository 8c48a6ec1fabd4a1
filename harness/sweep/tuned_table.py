"""The table of mode=tune over several engines: the best of each kind of scheme of all of them, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.planning.tune import candidate_table
from harness.planning.tune.result import Best, Counts, Reason
from harness.report.columns import drawn
from harness.sweep.row import Row

OWN = ("engine", "planner")
"""Keys in which searches may differ whose schemes are compared in one table."""


def is_one_search(rows: Sequence[Row]) -> bool:
    """Whether the points are searches over engines, which have all else in common."""
    return bool(rows) and all(
        row.point.values().get("mode") == "tune" and _others(row) == _others(rows[0]) for row in rows
    )


def _others(row: Row) -> dict[str, str]:
    return {key: value for key, value in row.point.values().items() if key not in OWN}


def tuned_of(row: Row) -> dict[str, Any] | None:
    """What a search has found; None where it has found nothing."""
    found: dict[str, Any] | None = row.record.metrics.get("tuned") if row.record else None
    return found


def kinds(rows: Sequence[Row]) -> list[Best]:
    """The best of each kind of scheme, the fastest first."""
    found = [Best(**kind) for row in rows for kind in (tuned_of(row) or {}).get("kinds", ())]
    return sorted(found, key=lambda one: (one.step_time_s, one.scheme))


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, what it means, and for each engine what was searched."""
    best = kinds(rows)
    if not best:
        return
    table, left_out = drawn(candidate_table.columns(best), console.width)
    console.print(table)
    for line in _below(rows, best, left_out):
        console.print(Text(line), soft_wrap=True)


def _below(rows: Sequence[Row], best: Sequence[Best], left_out: Sequence[str]) -> Iterator[str]:
    searched = [(found, row.record.config) for row in rows if row.record and (found := tuned_of(row))]
    yield candidate_table.assumed(searched[0][1], best)
    yield from candidate_table.legend(best)
    if left_out:
        yield f"no room for: {', '.join(left_out)}"
    for found, config in searched:
        reasons = [Reason(**one) for one in found["impossible"]]
        lines = candidate_table.summary(Counts(**found["counts"]), reasons, found["left_out"], interrupted=False)
        yield f"{config['engine']['name']}: " + "\n  ".join(lines)


def unfinished(rows: Sequence[Row], folder: Path) -> Iterator[str]:
    """The line on a search that was interrupted: engines that were searched in part, and those of which nothing is
    known."""
    left = [row for row in rows if row.record is None or row.record.status == "preempted"]
    names: dict[bool, list[str]] = {True: [], False: []}
    for row in left:
        names[tuned_of(row) is not None].append(row.point.values().get("engine", row.point.id))
    parts = [f"searched in part: {', '.join(names[True])}"] if names[True] else []
    parts += [f"nothing is known of: {', '.join(names[False])}"] if names[False] else []
    if left:
        again = f"the same command with out={folder} searches these alone"
        yield f"interrupted, others may be faster; {'; '.join(parts)}   -> {again}"


def winner(rows: Sequence[Row]) -> list[str]:
    """The last lines of several searches, as those of one."""
    best = kinds(rows)
    return [*candidate_table.winner(best)] if best else []
