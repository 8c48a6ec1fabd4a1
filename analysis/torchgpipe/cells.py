"""The absolute figures of torchgpipe's tables and public benchmarks, next to the simulated ones."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.cells import Cell, billions, compared
from analysis.paper_data import counted
from analysis.torchgpipe import benchmarks, table3
from analysis.torchgpipe.quantities import FILES, MEMORY, PARAMETERS, QUANTITIES, SPEED, SPEED_UP, UTILIZATION, paper
from analysis.torchgpipe.sweep_results import PIPELINES, ROWS, Results

UNITS = {
    SPEED: "throughput, samples/s",
    SPEED_UP: "speed-up",
    UTILIZATION: "utilization, %",
    MEMORY: "memory, GiB",
    PARAMETERS: "parameters, 1e9",
}


def cells(results: Results) -> list[Cell]:
    """Tables 1 to 4, the largest U-Nets of Table 3's search, and the benchmarks of the public documentation."""
    return [*_tables(results), *_largest(results), *benchmarks.cells(results)]


def _tables(results: Results) -> Iterator[Cell]:
    for table, quantities in QUANTITIES.items():
        for quantity in filter(UNITS.__contains__, quantities):  # the others are not published
            rows = ROWS[table][1:] if quantity is SPEED_UP else ROWS[table]
            ours = {row: quantity.of(results, table, row, "simulated") for row in rows}
            if quantity is PARAMETERS:
                figures = {row: (_parameters(row), billions(count)) for row, count in ours.items()}
            else:
                figures = {row: (paper(table, row, quantity.name), figure) for row, figure in ours.items()}
            yield from compared(f"Table {table}", UNITS[quantity], figures)


def _largest(results: Results) -> Iterator[Cell]:
    """What the search finds has no row in a table of ours, but the paper's rows are the largest that fit."""
    found = {row: table3.largest(results, row) for row in PIPELINES}
    figures = {row: (_parameters(row), billions(fits.parameters if fits else None)) for row, fits in found.items()}
    yield from compared("Table 3, search", "parameters of the largest that fits, 1e9", figures)


def _parameters(row: str) -> float | None:
    """As the paper prints them, rounded."""
    return billions(counted(FILES[3], "parameters", scheme=row))
