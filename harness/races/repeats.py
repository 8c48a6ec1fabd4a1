"""`mode=race repeats=3`: a race for each of three seeds, and the mean and the spread of their figures.

seed-0/   single 1.00   gpipe 1.31   ddp 1.62
seed-1/   single 1.00   gpipe 1.28   ddp 1.66     ->   gpipe 1.30 +- 0.02, ranks 2, 2, 2
seed-2/   single 1.00   gpipe 1.30   ddp 1.60
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.core import files
from harness.core.run_files import RACE, RACE_PICTURE
from harness.core.serialization import finite
from harness.core.units import UNKNOWN, number, seconds
from harness.races import picture
from harness.races.entries import Entry
from harness.races.result import Result
from harness.report import comparison
from harness.report.columns import Column, drawn
from harness.sweep.repeats import TITLE, Summary
from harness.sweep.table import console_of_sweep


def show(results: Sequence[Result], folder: Path, console: Console | None = None) -> None:
    """Print the table over the seeds, the fastest entry first; write race.json and race.png of all to the folder."""
    console = console or console_of_sweep()
    console.print(Text(f"{TITLE}:"))
    console.print(drawn([*_columns(results)], console.width)[0])
    console.print(Text(f"{len(results)} races ({folder})"), soft_wrap=True)
    files.write_text(folder / RACE, json.dumps(finite(to_json(results)), indent=1))
    if bars := _bars(results):
        reference = next(one.reference.name for one in results if one.reference)
        label = f"speed relative to {reference}, measured: mean and standard deviation of {len(results)} races"
        picture.write(bars, folder / RACE_PICTURE, label, picture.title(results[0]))


def to_json(results: Sequence[Result]) -> dict[str, Any]:
    """The folder of each race, and the figures of each entry in all of them; null where it has not finished."""
    return {
        "races": [one.folder.name for one in results],
        "entries": [
            {
                "name": name,
                "step_time_s": [_step(one, name) for one in results],
                "speed_over_reference": [_speed(one, name) for one in results],
                "rank": [one.places[name].rank if name in one.places else None for one in results],
            }
            for name in _names(results)
        ],
    }


def _columns(results: Sequence[Result]) -> Iterator[Column]:
    names = sorted(_names(results), key=lambda name: _mean(results, _step, name))

    def summed(title: str, value: Callable[[Result, str], float | None], text: Callable[[float], str]) -> Column:
        return Column(title, [_summary(results, value, name, text) for name in names], figure=True)

    yield Column("entry", names)
    yield Column("finished", [f"{sum(name in one.places for one in results)} of {len(results)}" for name in names])
    yield summed("step time", _step, seconds)
    yield summed("speed /\nreference", _speed, lambda value: f"{value:.2f}")
    ranks = (", ".join(str(one.places.get(name, UNKNOWN)) for one in results) for name in names)
    yield Column("ranks", [*ranks], figure=True)
    yield summed("last\nloss", _loss, number)


def _bars(results: Sequence[Result]) -> list[picture.Bar]:
    bars = []
    for name in _names(results):
        if known := _known(results, _speed, name):
            found = Summary.of(known)
            bars.append(picture.Bar(name, found.mean, found.mean - found.spread, found.mean + found.spread))
    return bars


def _names(results: Sequence[Result]) -> list[str]:
    return [one.name for one in results[0].entered]


def _entry(result: Result, name: str) -> Entry | None:
    return next((one for one in result.finished if one.name == name), None)


def _step(result: Result, name: str) -> float | None:
    one = _entry(result, name)
    return one.step_time_s if one else None


def _speed(result: Result, name: str) -> float | None:
    return result.ratios[name].value if name in result.ratios else None


def _loss(result: Result, name: str) -> float | None:
    one = _entry(result, name)
    return comparison.losses(one.row.record)[1] if one and one.row.record else None


def _known(results: Sequence[Result], value: Callable[[Result, str], float | None], name: str) -> list[float]:
    """The figures of an entry in the races that it has finished."""
    return [found for one in results if (found := value(one, name)) is not None]


def _mean(results: Sequence[Result], value: Callable[[Result, str], float | None], name: str) -> float:
    known = _known(results, value, name)
    return Summary.of(known).mean if known else float("inf")


def _summary(
    results: Sequence[Result], value: Callable[[Result, str], float | None], name: str, text: Callable[[float], str]
) -> str:
    known = _known(results, value, name)
    return Summary.of(known).shown(text) if known else UNKNOWN
