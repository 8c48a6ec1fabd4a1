"""The absolute figures that Myelin's paper prints or plots, next to the simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from analysis import run_artifacts
from analysis.cells import Cell, billions, compared
from analysis.myelin import quantities
from analysis.myelin.sweep_results import FRAMEWORKS, GB, LOCAL, PAPER, Results, Row

PHASES = dict(zip(quantities.PHASES, ("pipelining, s", "sums over replicas, s", "optimizer, s"), strict=True))
DRAWN = ((quantities.WITHOUT, 24), (quantities.WITH, 6))
"""The bars of Fig. 6; Sec. V-B has both memories on 24 stages."""


def cells(results: Results) -> list[Cell]:
    """Table I, and Figures 5, 6, 8, 10 and 11."""
    return [*_table1(results), *_fig5(results), *_fig6(results), *_fig8(results), *_scaling(results)]


def _table1(results: Results) -> Iterator[Cell]:
    rows = results.rows("table1", scale=PAPER) + results.rows("table1", scale=LOCAL)
    figures = {
        row.size: (billions(quantities.published_parameters(row)), billions(_figure(row, lambda row: row.parameters)))
        for row in rows
    }
    yield from compared("Table I", "parameters, 1e9", figures)


def _fig5(results: Results) -> Iterator[Cell]:
    rows = {_stages(row): row for row in results.rows("fig5", scale=PAPER)}
    figures = {
        f"{stages} stages": (quantities.published_batch_s(stages), _figure(row, _phase("pipelining")))
        for stages, row in rows.items()
    }
    yield from compared("Fig. 5", "pipelining, s", figures)


def _fig6(results: Results) -> Iterator[Cell]:
    rows = results.rows("fig6", scale=PAPER)
    drawn = [row for row in rows if (quantities.memory_scheme(row), _stages(row)) in DRAWN]
    for phase, quantity in PHASES.items():
        figures = {_grid(row): (quantities.published_phase_s(row, phase), _figure(row, _phase(phase))) for row in drawn}
        yield from compared("Fig. 6", quantity, figures)
    held = {
        _grid(row): (quantities.published_memory_gb(row), _figure(row, lambda row: row.total_bytes / GB))
        for row in rows
        if _stages(row) == DRAWN[0][1]
    }
    yield from compared("Fig. 6", "memory of all devices, GB", held)


def _fig8(results: Results) -> Iterator[Cell]:
    rows = {int(row["engine.k"]): row for row in results.rows("fig8", scale=PAPER)}
    figures = {
        f"k={k}" if k else "no overlap": (quantities.published_overlapped_s(k), _figure(row, quantities.tail_s))
        for k, row in rows.items()
    }
    yield from compared("Fig. 8", "sums and updates, s", figures)


def _scaling(results: Results) -> Iterator[Cell]:
    """Days and percent of peak of each framework; Fig. 11 has days alone."""
    kinds = (("days", quantities.DAYS, quantities.days), ("% of peak", quantities.PERCENT, quantities.percent_of_peak))
    for figure in ("Fig. 10", "Fig. 11"):
        rows = results.rows(figure.lower().replace(". ", ""), scale=PAPER)
        for (quantity, metric, ours), framework in ((kind, name) for kind in kinds for name in FRAMEWORKS):
            figures = {
                row.size if figure == "Fig. 10" else f"{quantities.gpus(row)} GPUs": (
                    quantities.published_scaling(row, figure, metric),
                    _figure(row, ours),
                )
                for row in rows
                if row.framework == framework
            }
            yield from compared(figure, f"{quantity}, {framework}", figures)


def _figure(row: Row, ours: Callable[[Row], float]) -> float | None:
    """Our figure of a point; None if it was not run well, or its files are gone."""
    return run_artifacts.optional(ours, row) if row.ok else None


def _phase(name: str) -> Callable[[Row], float]:
    return lambda row: row.phase_s(name)


def _stages(row: Row) -> int:
    """As the point gives them, run or not."""
    return len(row["planner.balance"].split(","))


def _grid(row: Row) -> str:
    return f"{_stages(row)} stages, {quantities.memory_scheme(row).split()[0]} memopt"
