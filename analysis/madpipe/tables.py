"""The figures of the paper as tables: planned periods, and what becomes of each claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from analysis import changed_checks, claim_check
from analysis.madpipe import comparison
from analysis.madpipe.claim_checks import RESNET, SPEED_GB, TIGHT_GB, verdicts
from analysis.madpipe.fig7 import Cell, cell
from analysis.madpipe.sweep_results import (
    BAND,
    BASELINE,
    CONTIGUOUS,
    EXACT,
    NETWORKS,
    PERCENTS,
    PIPEDREAM,
    PUBLISHED,
    SENTENCE,
    Instance,
    Results,
    Row,
    Schemes,
)
from analysis.report import MISSING, Section

MEMORIES = range(3, 17)
SHOWN = (2, 4, 8)
"""Numbers of devices of the table of Figure 6; the picture has all."""
NAMED = 2
"""Number of columns that identify a row, at least."""
SOURCE = (
    "Planned, on analytic profiles of a GPU with 7 TFLOP/s and 600 GB/s; the paper measured on a GPU that it does not "
    "name."
)
MEANS = "Geometric means over 2 to 8 devices and both links, of instances that both can do."
PLANNERS = (
    f"{PUBLISHED} is the paper's Algorithm 1 on its grids and its integer program, with its limit of 60 s; "
    f"{EXACT} is our planner: no grids, and never worse than the best contiguous plan."
)


def sections(results: Results) -> list[Section]:
    """The tables of which something was run; the last one is that of the claims."""
    makers = {"fig6": (_fig6,), "fig7": (_fig7, _fits), BAND: (_band,), "fig8": (_fig8,)}
    tables = [
        _of_what_ran(make(results), *results.count(sweep))
        for sweep, of_sweep in makers.items()
        if results.count(sweep)[0]
        for make in of_sweep
    ]
    found = verdicts(results)
    tables.append(comparison.section(results))
    return [*tables, claim_check.section(found), *changed_checks.sections("madpipe", found)]


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
            rows.append(_periods(schemes, (RESNET, devices, memory, 12)))
    columns = (
        "devices",
        "GB",
        "PipeDream hopes",
        "PipeDream",
        CONTIGUOUS,
        f"{PUBLISHED}: hopes",
        PUBLISHED,
        f"{EXACT}: bound",
        EXACT,
        "PipeDream / as published",
        "PipeDream / exact",
    )
    notes = (SOURCE, PLANNERS, "Links of 12 GB/s; PipeDream with its optimizer's estimate of memory.")
    return Section(f"Fig. 6: periods of {RESNET}, in ms", columns, tuple(rows), notes, texts=0)


def _periods(schemes: Schemes, one: Instance) -> tuple[str, ...]:
    def row(scheme: str) -> Row | None:
        return schemes.get(scheme, {}).get(one)

    dream, ours, paper = row(BASELINE), row(EXACT), row(PUBLISHED)
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
        _quotient(dream, paper),
        _quotient(dream, ours),
    )


def _quotient(one: Row | None, other: Row | None) -> str:
    return f"{one.period_s / other.period_s:.2f}" if one and other and one.ok and other.ok else MISSING


def _ms(row: Row | None, field: str = "period_s") -> str:
    if row is None:
        return MISSING
    value = getattr(row, field)
    return f"{1e3 * value:.0f}" if math.isfinite(value) else "none"


def _fig7(results: Results) -> Section:
    rows, schemes = [], results.by_scheme("fig7")
    for network in NETWORKS.values():
        for scheme in (*PIPEDREAM.values(), CONTIGUOUS, EXACT):
            cells = [cell(schemes, network, memory, scheme) for memory in MEMORIES]
            rows.append((network, scheme, *(_ratio(one) for one in cells)))
        for title, scheme in (("what PipeDream hopes", BASELINE), ("what MadPipe's first phase hopes", PUBLISHED)):
            hopes = [cell(schemes, network, memory, scheme, first_phase=True) for memory in MEMORIES]
            rows.append((network, title, *(_ratio(one) for one in hopes)))
        exact = [cell(schemes, network, memory, BASELINE, madpipe=EXACT) for memory in MEMORIES]
        rows.append((network, f"{BASELINE} / {EXACT}", *(_ratio(one) for one in exact)))
    columns = ("network", f"period / {PUBLISHED}", *(f"{memory} GB" for memory in MEMORIES))
    notes = (SOURCE, PLANNERS, MEANS)
    return Section("Fig. 7: ratios of periods", columns, tuple(rows), notes, texts=2)


def _band(results: Results) -> Section:
    rows = []
    for network in NETWORKS.values():
        for scheme in (BASELINE, SENTENCE):
            for percent in (PERCENTS[0], 100, PERCENTS[1]):
                schemes = results.by_scheme("fig7") if percent == 100 else results.with_activations(percent)
                cells = [cell(schemes, network, memory, scheme) for memory in TIGHT_GB]
                rows.append((network, scheme, f"{percent} %", *(_ratio(one) for one in cells)))
    columns = ("network", f"period / {PUBLISHED}", "activations", *(f"{memory} GB" for memory in TIGHT_GB))
    notes = ("Activations: what a layer stores and sends, in percent of the profile's own.", MEANS)
    return Section("Fig. 7 below 10 GB, with other activations", columns, tuple(rows), notes, texts=3)


def _ratio(one: Cell) -> str:
    return MISSING if one.ratio is None else f"{one.ratio:.2f}"


def _fits(results: Results) -> Section:
    rows = []
    schemes = results.by_scheme("fig7")
    for network in NETWORKS.values():
        for scheme in (*PIPEDREAM.values(), CONTIGUOUS, PUBLISHED, EXACT):
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
            for memory in SPEED_GB:
                for scheme in (BASELINE, PUBLISHED, EXACT):
                    rows_of_scheme = [schemes.get(scheme, {}).get((network, p, memory, bandwidth)) for p in range(2, 9)]
                    rows.append((network, f"{bandwidth} GB/s, {memory} GB", scheme, *map(_speedup, rows_of_scheme)))
    columns = ("network", "links, memory", "scheme", *(f"P = {devices}" for devices in range(2, 9)))
    return Section("Fig. 8: speed-up over one device", columns, tuple(rows), (SOURCE, PLANNERS), texts=3)


def _speedup(row: Row | None) -> str:
    if row is None:
        return MISSING
    return f"{row.speedup:.2f}" if row.ok else "none"
