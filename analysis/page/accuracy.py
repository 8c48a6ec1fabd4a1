"""How near simulated step times are to measured ones: of the benchmark `prediction`, and of all measured records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from analysis import accuracy as ledger
from analysis.plots.style import COLOURS, legend, panels, styled
from analysis.report import Section
from harness.core.record import RunRecord
from harness.core.units import seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The benchmark: a U-Net in two stages of engine=gpipe on two CPU devices, batch 16"
COLUMNS = (
    "micro-batches, recomputation",
    "measured step",
    "quartiles",
    "simulated step",
    "simulated / measured: time",
    "memory, device 0",
    "memory, device 1",
)
NEAR = 0.1
"""Half the width of the band around equal."""
MOST = 1.2
"""The axis reaches at least so far in both directions."""
TICKS = (0.125, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 4, 8)


def table(rows: Sequence[dict[str, Any]]) -> Section | None:
    """The benchmark's runs, measured and simulated; None without any. `rows` are those of bench.json."""
    lines = tuple(_line(row) for row in rows if "predicted" in row)
    return Section(TITLE, COLUMNS, lines) if lines else None


def ledger_tables(measured: Iterable[RunRecord]) -> list[Section]:
    """The accuracy ledger of the measured records: the misses first, then by engine, by model, and each contest's
    order. None without any case."""
    found = ledger.ledger(measured)
    if not found.cases:
        return []
    engines = [*ledger.by(found.cases, lambda one: one.engine), *ledger.by(found.cases, lambda _: "all")]
    models = ledger.by(found.cases, lambda one: one.model)
    tables: list[tuple[str, Sequence[str], Sequence[tuple[str, ...]], int]] = [
        ("The worst predictions", ("run", *ledger.MISS_TITLES[1:]), ledger.misses(found.cases), 3),
        ("By engine", ("engine", *ledger.TITLES), engines, 1),
        ("By model", ("model", *ledger.TITLES), models, 1),
        ("By the length of a step", ("steps of", *ledger.TITLES), ledger.by(found.cases, ledger.length), 1),
        ("Orders of several engines on the same work", ledger.ORDER_TITLES, ledger.orders(found.cases), 1),
    ]
    return [
        Section(title, tuple(name.replace("\n", " ") for name in titles), tuple(rows), notes, texts)
        for number, (title, titles, rows, texts) in enumerate(tables)
        for notes in [tuple(ledger.sources(found)) if number == 0 else ()]
        if rows
    ]


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, str] | None:
    """The median error of the benchmark's step times as a "figure" and a "text"; None without any."""
    error = next((row["error of time"] for row in rows if "error of time" in row), None)
    count = sum("predicted" in row for row in rows)
    text = f"median error of simulated step times: {count} runs of a U-Net in two stages"
    return None if error is None else {"figure": f"{100 * error:.1f} %", "text": text}


def ratios(loaded: Iterable[RunRecord]) -> dict[str, dict[str, list[float]]]:
    """Simulated / measured step time of the newest record of each measured point: by engine, then by model."""
    found: dict[str, dict[str, list[float]]] = {}
    for case in ledger.cases(loaded):
        found.setdefault(case.engine, {}).setdefault(case.model, []).append(case.ratio)
    return found


@styled
def figure(found: dict[str, dict[str, list[float]]]) -> Figure | None:
    """A line of dots for each engine, coloured by model; None without any. `found` is from `ratios`."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    if not found:
        return None
    engines = sorted(found, reverse=True)
    models = sorted({model for of_engine in found.values() for model in of_engine})
    drawn, ((axes,),) = panels(1, 1, 12, 0.34 * len(engines) + 1.6)
    everything = [1 / MOST, MOST]
    for place, engine in enumerate(engines):
        for model, values in found[engine].items():
            number = models.index(model)
            height = place + 0.2 * (number - (len(models) - 1) / 2)  # so that no model's dots are over another's
            axes.scatter(values, [height] * len(values), 26, COLOURS[number % len(COLOURS)], alpha=0.75, linewidths=0)
            everything += values
    axes.axvspan(1 - NEAR, 1 + NEAR, color="#DDDDDD", alpha=0.5, zorder=0)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlim=(0.9 * min(everything), 1.05 * max(everything)), ylim=(-0.6, len(engines) - 0.4))
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_yticks(range(len(engines)), [f"{name} ({_count(found[name])})" for name in engines])
    axes.set_xlabel(f"simulated / measured step time (left of 1: the run took longer; grey: within {NEAR:.0%})")
    total = sum(map(_count, found.values()))
    axes.set_title(f"{total} runs of small models on CPU devices; in brackets, runs of an engine")
    legend(drawn, dict(zip(models, COLOURS, strict=False)))
    return drawn


def _count(of_engine: dict[str, list[float]]) -> int:
    return sum(map(len, of_engine.values()))


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["entry"],
        seconds(row["step"]),
        " - ".join(map(seconds, row["quartiles"])),
        seconds(row["predicted"]),
        *(f"{row[key]:.2f}" for key in ("predicted / measured", "memory, device 0", "memory, device 1")),
    )
