"""torchgpipe: Tables 1, 2 and 4 as bars and lines, and Figure 7, the timelines of Table 1."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from analysis.plots.style import BLUE, COLOURS, DARK, LOOKS, Bars, Source, bars, legend, line, panels, styled
from analysis.torchgpipe import traces
from analysis.torchgpipe.quantities import MEMORY, SPEED, SPEED_UP, UTILIZATION, Quantity, paper, small_speed_up
from analysis.torchgpipe.sweep_results import ROWS, SMALL, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = {
    SPEED.name: "throughput (samples/s)",
    SPEED_UP.name: "speed-up",
    UTILIZATION.name: "utilization (%)",
    MEMORY.name: "peak memory (GiB)",
}
STAGES, MICRO_BATCHES = (2, 4, 8), (1, 4, 32)
"""Of Table 2."""


@styled
def table1(results: Results) -> Figure | None:
    """Speed, utilization and memory with each component; measured in small where scales can be compared."""
    if not results.has_rows(1):
        return None
    figure, axes = panels(1, 3, 13, 3.8)
    _quantity(axes[0, 0], results, 1, SPEED_UP, ("paper", "simulated", "measured"))
    _quantity(axes[0, 1], results, 1, UTILIZATION, ("paper", "simulated", "measured"))
    _quantity(axes[0, 2], results, 1, MEMORY, ("paper", "simulated"))
    figure.suptitle("torchgpipe, Table 1: what each component adds (measured: a small U-Net on this machine)")
    legend(figure, {}, [*LOOKS])
    return figure


@styled
def table2(results: Results) -> Figure | None:
    """Speed-up over n = 2, m = 1 against micro-batches; on the right in small."""
    if not results.has_rows(2):
        return None
    figure, axes = panels(1, 2, 11, 4.1)
    colours = {1: DARK} | dict(zip(STAGES, COLOURS, strict=False))
    for stages in STAGES:
        rows = [f"n={stages} m={count}" for count in MICRO_BATCHES]
        simulated = [SPEED_UP.of(results, 2, row, "simulated") for row in rows]
        _curve(axes[0, 0], MICRO_BATCHES, [paper(2, row, "speed-up") for row in rows], colours[stages], "paper")
        _curve(axes[0, 0], MICRO_BATCHES, simulated, colours[stages], "simulated")
    for stages, own in itertools.groupby(SMALL, lambda row: row.split()[0]):
        rows = list(own)
        counts = [int(row.split("m=")[1]) for row in rows]
        colour = colours[int(stages.removeprefix("n="))]
        _curve(axes[0, 1], counts, [small_speed_up(results, row) for row in rows], colour, "measured")
    axes[0, 0].set(title="AmoebaNet-D (18, 256) on 2, 4 and 8 devices", ylabel="speed-up over n = 2, m = 1")
    axes[0, 1].set(title="in small, two devices share two cores, measured", ylabel="speed-up over n = 2, m = 1")
    figure.suptitle("torchgpipe, Table 2: speed-up by number of micro-batches (m) and of devices (n)")
    for panel in axes[0]:
        panel.set_ylim(bottom=0)
    legend(figure, {f"n = {stages}": colour for stages, colour in colours.items()}, [*LOOKS], lines=True)
    return figure


@styled
def table4(results: Results) -> Figure | None:
    """Throughput, and speed-up over one device without a pipeline."""
    if not results.has_rows(4):
        return None
    figure, axes = panels(1, 2, 12, 3.8)
    _quantity(axes[0, 0], results, 4, SPEED, ("paper", "simulated"))
    _quantity(axes[0, 1], results, 4, SPEED_UP, ("paper", "simulated", "measured"))
    figure.suptitle("torchgpipe, Table 4: speed of U-Net (5, 64) (measured: a small one, devices share two cores)")
    legend(figure, {}, [*LOOKS])
    return figure


def fig7(results: Results) -> Figure | None:
    """The timelines of the four rows of Table 1, simulated; from the chosen traces."""
    from harness.report.timeline_plot import figure

    if not results.has_rows(1):
        return None
    chosen = traces.load("torchgpipe_table1-paper")
    return figure([(one.title, one.trace) for one in chosen]) if chosen else None


def _quantity(axes: Axes, results: Results, table: int, quantity: Quantity, sources: tuple[Source, ...]) -> None:
    """Bars of the sources that have a value."""
    rows, series = ROWS[table], []
    for source in sources:
        values = [
            paper(table, row, quantity.name) if source == "paper" else quantity.of(results, table, row, source)
            for row in rows
        ]
        if any(value is not None for value in values):
            series.append(Bars(values, BLUE, source))
    names = [row.replace("Pipeline-", "Pipeline\n").replace("Naive-", "Naive\n") for row in rows]
    bars(axes, names, series, "{:.2f}" if quantity is SPEED_UP else "{:.3g}")
    axes.set(title=quantity.name, ylabel=UNITS[quantity.name])


def _curve(axes: Axes, x: tuple[int, ...] | list[int], values: list[float | None], colour: str, source: Source) -> None:
    line(axes, x, [float("nan") if one is None else one for one in values], colour, source)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(x), [str(count) for count in x])
    axes.set_xlabel("number of micro-batches (m)")


FIGURES = {
    "torchgpipe_table1": table1,
    "torchgpipe_table2": table2,
    "torchgpipe_table4": table4,
    "torchgpipe_fig7": fig7,
}
"""Figures by the names of their files."""
