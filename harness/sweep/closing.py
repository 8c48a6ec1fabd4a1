"""What a sweep prints at its end: the table, what it means, why points failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness.checks.micro_batches import COUNT, SIZE
from harness.core.record import RunRecord
from harness.core.run_files import RECORD, TABLE
from harness.core.units import AT_MOST, UPPER_BOUND
from harness.planning.tune.result import Reason
from harness.report import comparison
from harness.report.columns import MESH_LEGEND, drawn
from harness.report.run_notes import shared_lock
from harness.sweep import repeats, tuned_table
from harness.sweep.row import PREDICTED, Row
from harness.sweep.table import BEST, MESH, best, console_of_sweep, several_devices, table

REASON_LINES = 8
MOST_ROWS = 500
"""Points that a closing table shows at most: drawing one takes a millisecond, and nobody reads so many."""


def close(rows: Sequence[Row], folder: Path, console: Console | None = None) -> None:
    """Print the closing table, why points failed, and a line about the whole sweep.

    Of mode=tune over engines it is one table of all schemes, with a line on those that an interrupt has left, and the
    last line is the command of the fastest that trains. Below the table is one over the seeds, where points differ in
    these alone.
    """
    console = console or console_of_sweep()
    one_search = tuned_table.is_one_search(rows)
    if one_search:
        tuned_table.show(rows, console)
    else:
        _show(rows, console)
    ended_well = ("ok", *(["preempted"] if one_search else []))
    failed = [(row, row.record) for row in rows if row.record is not None and row.record.status not in ended_well]
    for row, record in failed[:MOST_ROWS]:
        lines = _shortened(record.reason.strip().splitlines()) + ([f"log: {row.log}"] if row.log else [])
        who = row.point.values().get("engine", row.point.id) if one_search else row.point.id
        console.print(Text("\n  ".join([f"{who} {record.status}", *lines])), soft_wrap=True)
    if len(failed) > MOST_ROWS:
        text = f"{len(failed) - MOST_ROWS} further points have failed: their {RECORD} says why"
        console.print(Text(text), soft_wrap=True)
    middle, last = (
        (tuned_table.unfinished(rows, folder), tuned_table.winner(rows)) if one_search else (_tuned(rows), [])
    )
    for line in [*middle, f"{summary(rows)} ({folder})", *last]:
        console.print(Text(line), soft_wrap=True)


def _shortened(lines: list[str]) -> list[str]:
    """The first lines of a reason, and the last ones of a traceback, which say what is wrong, and where."""
    if len(lines) <= REASON_LINES:
        return lines
    return [*lines[: REASON_LINES - 3], "...", *lines[-2:]]


def _show(rows: Sequence[Row], console: Console) -> None:
    """The table, what it means, and the table over the seeds."""
    some = _some(rows)
    shown, left_out = table(some, console.width)
    console.print(shown)
    if len(some) < len(rows):
        text = f"{len(rows) - len(some)} further points are not shown: {TABLE} of a sweep that has ended has all"
        console.print(Text(text), soft_wrap=True)
    for line in _legend(rows, left_out, console.width):
        console.print(Text(line), soft_wrap=True)
    if groups := repeats.groups(rows):
        console.print(Text(f"\n{repeats.TITLE}:"))
        console.print(drawn([*repeats.columns(groups[:MOST_ROWS])], console.width)[0])
        if len(groups) > MOST_ROWS:
            console.print(Text(f"{len(groups) - MOST_ROWS} further groups of points are not shown"), soft_wrap=True)


def _some(rows: Sequence[Row]) -> list[Row]:
    """The points of the table: all, or of very many the fastest, the references, and the first of those that have
    ended, then of all others."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    fastest = {id(row) for row in best(rows)}

    def place(row: Row) -> int:
        return 0 if id(row) in fastest or row.is_reference else 1 if row.record else 2

    chosen = {id(row) for row in sorted(rows, key=place)[:MOST_ROWS]}
    return [row for row in rows if id(row) in chosen]


def _tuned(rows: Sequence[Row]) -> Iterator[str]:
    """Of points of mode=tune: why candidates are impossible, and the command of the fastest one of all points."""
    found = [(row, tuned) for row in rows if (tuned := tuned_table.tuned_of(row))]
    for row, tuned in found:
        yield from (f"{row.point.id} {Reason(**one)}" for one in tuned.get("impossible", ()))
    if found:
        fastest, tuned = max(found, key=lambda one: one[0].throughput or 0.0)
        yield f"{fastest.point.id} is the fastest, run it: {tuned['command']}"


def _legend(rows: Sequence[Row], left_out: Sequence[str], width: int) -> Iterator[str]:
    """What marks and sizes in the table mean, what it leaves out, and why points cannot be compared like with like."""
    records = [row.record for row in rows]
    if leading := best(rows):
        fastest = (row.record for row in leading if row.record)
        doubt = ", but on a busy machine" if any(map(comparison.slowed, fastest)) else ""
        several = len({row.trained for row in rows if row.record}) > 1
        yield f"{BEST} best throughput{' of its model' if several else ''}{doubt}"
    if any(row.predicts for row in rows):
        yield f"{PREDICTED} predicted"
    if any(row.is_bound for row in rows):
        yield f"{AT_MOST} {UPPER_BOUND}"
    if several_devices(rows) and MESH not in left_out:
        yield MESH_LEGEND
    if left_out:
        yield f"no room on {width} columns for: {', '.join(left_out)}"
    yield from _sized(rows)
    yield from (f"note: {text}" for text in comparison.notes(records))
    yield from _sharing_a_lock([record for record in records if record])


def _sharing_a_lock(records: Sequence[RunRecord]) -> Iterator[str]:
    """For each engine whose devices wait for each other's Python, the note of its first such run."""
    found: dict[str, str] = {}
    for record in records:
        if record.source == "measured" and record.status == "ok" and not comparison.slowed(record):
            for text in shared_lock(record):
                found.setdefault(record.config["engine"]["name"], text)
    yield from (f"note: {engine}: {text}" for engine, text in found.items())


def _sized(rows: Sequence[Row]) -> Iterator[str]:
    """Which engines were given a size of micro-batches, so that all have the same."""
    sized = [row for row in rows if SIZE in row.point.values()]
    if sized and len(sized) < len(rows):
        names = ", ".join(dict.fromkeys(row.point.values().get("engine", row.point.id) for row in sized))
        given = " and ".join(dict.fromkeys(f"{SIZE}={row.point.values()[SIZE]}" for row in sized))
        yield f"note: micro-batches have one size for all: {names} got {given}   -> {COUNT}=... for another number"


def summary(rows: Sequence[Row]) -> str:
    """6 points: 4 ok, 1 oom, 1 not run; 2 of them done before"""
    states = [row.state for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states), key=lambda s: (s != "ok", s)))
    before = sum(row.before for row in rows)
    return f"{len(rows)} point{'s' * (len(rows) != 1)}: {counts}" + (
        f"; {before} of them done before" if before else ""
    )
