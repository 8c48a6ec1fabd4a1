"""The figures of the paper as tables: planned periods, and what becomes of each claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from analysis import claim_check
from analysis.madpipe.claim_checks import BASELINE, verdicts
from analysis.madpipe.fig7 import Cell, cell
from analysis.madpipe.sweep_results import CONTIGUOUS, MADPIPE, NETWORKS, PIPEDREAM, PUBLISHED, SWEEPS, Results, Row
from analysis.report import MISSING, Section

MEMORIES = range(3, 17)
SHOWN = (2, 4, 8)
"""Numbers of devices of the table of Figure 6; the picture has all."""
NAMED = 2
"""Number of columns that identify a row, at least."""
SPEEDS = (4, 8, 12, 16)
SOURCE = (
    "Planned, on analytic profiles of a GPU with 7 TFLOP/s and 600 GB/s; the paper measured on a GPU that it does not "
    "name."
)


def sections(results: Results) -> list[Section]:
    """The tables of which something was run; the last one is that of the claims."""
    makers = {"fig6": (_fig6,), "fig7": (_fig7, _fits), "fig8": (_fig8,)}
    tables = [
        _of_what_ran(make(results), *results.count(sweep))
        for sweep in SWEEPS
        if results.count(sweep)[0]
        for make in makers[sweep]
    ]
    return [*tables, claim_check.section(verdicts(results))]


def _of_what_ran(section: Section, ran: int, count: int) -> Section:
    """Drop the rows and columns without a result if points are missing, and print the number of points."""
    if ran == count:
        return section
    names = max(section.texts, NAMED)
    rows = [row for row in section.rows if set(row[names:]) != {MISSING}]
    kept = [k for k in range(len(section.columns)) if k < names or any(row[k] != MISSING for row in rows)]
    left_out = len(section.rows) - len(rows)
    note = f"{count - ran} of {count} points were not run" + (f"; {left_out} rows have none." if left_out else ".")
    return replace(
        section,
        columns=tuple(section.columns[k] for k in kept),
        rows=tuple(tuple(row[k] for k in kept) for row in rows),
        notes=(*section.notes, note),
    )


def _fig6(results: Results) -> Section:
    schemes, rows = results.by_scheme("fig6"), []
    for devices in SHOWN:
        for memory in MEMORIES:
            rows.append(_periods(schemes, ("ResNet-50", devices, memory, 12)))
    columns = (
        "devices",
        "GB",
        "PipeDream hopes",
        "PipeDream",
        CONTIGUOUS,
        f"{PUBLISHED}: hopes",
        PUBLISHED,
        "MadPipe: bound",
        MADPIPE,
        "PipeDream / MadPipe",
    )
    notes = (SOURCE, "Links of 12 GB/s; PipeDream with its optimizer's estimate of memory.")
    return Section("Fig. 6: periods of ResNet-50, in ms", columns, tuple(rows), notes, texts=0)


def _periods(
    schemes: dict[str, dict[tuple[str, int, int, int], Row]], one: tuple[str, int, int, int]
) -> tuple[str, ...]:
    def row(scheme: str) -> Row | None:
        return schemes.get(scheme, {}).get(one)

    dream, ours, paper = row(BASELINE), row(MADPIPE), row(PUBLISHED)
    both = dream is not None and ours is not None and dream.ok and ours.ok
    ratio = f"{dream.period_s / ours.period_s:.2f}" if both and dream and ours else MISSING
    return (
        str(one[1]),
        str(one[2]),
        _ms(dream, "first_phase_s"),
        _ms(dream),
        _ms(row(CONTIGUOUS)),
        _ms(paper, "first_phase_s"),
        _ms(paper),
        _ms(ours, "first_phase_s"),
        _ms(ours),
        ratio,
    )


def _ms(row: Row | None, field: str = "period_s") -> str:
    if row is None:
        return MISSING
    value = getattr(row, field)
    return f"{1e3 * value:.0f}" if math.isfinite(value) else "none"


def _fig7(results: Results) -> Section:
    rows = []
    for network in NETWORKS.values():
        for scheme in (*PIPEDREAM.values(), CONTIGUOUS):
            cells = [cell(results, network, memory, scheme) for memory in MEMORIES]
            rows.append((network, scheme, *(_ratio(one) for one in cells)))
        hopes = [cell(results, network, memory, BASELINE, first_phase=True) for memory in MEMORIES]
        rows.append((network, "what PipeDream hopes", *(_ratio(one) for one in hopes)))
        bounds = [cell(results, network, memory, MADPIPE, first_phase=True) for memory in MEMORIES]
        rows.append((network, "MadPipe's bound", *(_ratio(one) for one in bounds)))
    columns = ("network", "period / MadPipe's", *(f"{memory} GB" for memory in MEMORIES))
    notes = (SOURCE, "Geometric means over 2 to 8 devices and both links, of instances that both can do.")
    return Section("Fig. 7: ratios of periods", columns, tuple(rows), notes, texts=2)


def _ratio(one: Cell) -> str:
    return MISSING if one.ratio is None else f"{one.ratio:.2f}"


def _fits(results: Results) -> Section:
    rows = []
    schemes = results.by_scheme("fig7")
    for network in NETWORKS.values():
        for scheme in (*PIPEDREAM.values(), CONTIGUOUS, MADPIPE):
            own = [row for row in schemes.get(scheme, {}).values() if row.network == network]
            cells = [_unfit([row for row in own if row.memory_gb == memory]) for memory in MEMORIES]
            rows.append((network, scheme, *(cell.removesuffix(" of 14") for cell in cells), _unfit(own)))
    columns = ("network", "no plan", *(f"{memory} GB" for memory in MEMORIES), "in all")
    return Section("Instances without a plan, of 14 for each memory", columns, tuple(rows), texts=2)


def _unfit(rows: Sequence[Row]) -> str:
    """Return the number of instances without a plan, as text."""
    return f"{sum(not row.ok for row in rows)} of {len(rows)}" if rows else MISSING


def _fig8(results: Results) -> Section:
    schemes, rows = results.by_scheme("fig8"), []
    for network in NETWORKS.values():
        for bandwidth in (12, 24):
            for memory in SPEEDS:
                for scheme in (BASELINE, MADPIPE):
                    rows_of_scheme = [schemes.get(scheme, {}).get((network, p, memory, bandwidth)) for p in range(2, 9)]
                    rows.append((network, f"{bandwidth} GB/s, {memory} GB", scheme, *map(_speedup, rows_of_scheme)))
    columns = ("network", "links, memory", "scheme", *(f"P = {devices}" for devices in range(2, 9)))
    return Section("Fig. 8: speed-up over one device", columns, tuple(rows), (SOURCE,), texts=3)


def _speedup(row: Row | None) -> str:
    if row is None:
        return MISSING
    return f"{row.speedup:.2f}" if row.ok else "none"
