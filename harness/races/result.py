"""The result of a race: who finished, ratios, ranks, and how good the predictions were; race.json and the table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.core import files
from harness.core.run_files import RACE, RACE_PICTURE
from harness.core.serialization import finite
from harness.core.units import UNKNOWN, number, percent, rate, seconds, size
from harness.races import picture, verdict
from harness.races.entries import Entry
from harness.races.verdict import Place, Ratio
from harness.report import comparison
from harness.report.columns import Column, drawn, mesh_text
from harness.sweep.table import console_of_sweep

REASON_LINES = 8


@dataclass(frozen=True)
class Result:
    """`ratios` and `places` are those of the entries that have finished all rounds; ratios are to the first of these,
    the reference. It took `took_s` seconds, of which the first `start_s` were the start of all entries."""

    entered: Sequence[Entry]
    folder: Path
    took_s: float
    start_s: float
    finished: list[Entry]
    ratios: dict[str, Ratio]
    places: dict[str, Place]
    interrupted: bool = False

    @property
    def reference(self) -> Entry | None:
        """The entry that the others are compared with; None where none has finished."""
        return self.finished[0] if self.finished else None

    @property
    def predicted_s(self) -> dict[str, float]:
        """The predicted step time of each that has finished."""
        found = {one.name: one.row.record.predicted.get("step_time_s") for one in self.finished if one.row.record}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def tau(self) -> float | None:
        """Kendall's tau between ranks and predicted step times."""
        names = [*self.predicted_s]
        return verdict.kendalls_tau([self.places[name].rank for name in names], [*self.predicted_s.values()])

    @property
    def regret(self) -> tuple[str, float] | None:
        """The predicted best, and its step time / that of the measured best."""
        return verdict.regret({one.name: one.step_time_s for one in self.finished}, self.predicted_s)

    def predicted_ranks(self) -> dict[str, int]:
        """The place of each in the order of the predicted step times."""
        ordered = sorted(self.predicted_s, key=lambda name: self.predicted_s[name])
        return {name: place for place, name in enumerate(ordered, 1)}

    def show(self, console: Console | None = None) -> None:
        """Print the closing table and what it says, then write race.json and race.png: the disk may be full."""
        console = console or console_of_sweep()
        table, left_out = drawn([*_columns(self)], console.width)
        console.print(table)
        for line in _lines(self, left_out):
            console.print(Text(line), soft_wrap=True)
        files.write_text(self.folder / RACE, json.dumps(finite(self.to_json()), indent=1))
        picture.draw(self, self.folder / RACE_PICTURE)

    def to_json(self) -> dict[str, Any]:
        return {
            "entries": [self._entry(one) for one in self.entered],
            "reference": self.reference.name if self.reference else None,
            "rounds": max((len(one.rounds_s) for one in self.entered), default=0),
            "seconds": self.took_s,
            "start_seconds": self.start_s,
            "interrupted": self.interrupted,
            "kendalls_tau": self.tau,
            "predicted_best": dict(zip(("name", "over_best"), self.regret, strict=True)) if self.regret else None,
        }

    def _entry(self, one: Entry) -> dict[str, Any]:
        found, place = self.ratios.get(one.name), self.places.get(one.name)
        return {
            "name": one.name,
            "id": one.row.point.id,
            "overrides": list(one.overrides),
            "status": one.row.record.status if one.row.record else "not run",
            "rounds_s": one.rounds_s,
            "speed_over_reference": vars(found) if found else None,
            "rank": vars(place) if place else None,
            "predicted_step_time_s": self.predicted_s.get(one.name),
        }


def of(entered: Sequence[Entry], folder: Path, took_s: float, start_s: float, interrupted: bool = False) -> Result:
    """The result of a race that has ended, or was `interrupted`; `took_s` are its seconds, `start_s` those before the
    first round."""
    most = max((len(one.rounds_s) for one in entered), default=0)
    finished = [one for one in entered if most and len(one.rounds_s) == most and _is_ok(one)]
    rounds_s = {one.name: one.rounds_s for one in finished}
    ratios = {name: verdict.ratio(own, finished[0].rounds_s) for name, own in rounds_s.items()}
    return Result(entered, folder, took_s, start_s, finished, ratios, verdict.places(rounds_s), interrupted)


def _is_ok(one: Entry) -> bool:
    return one.row.record is not None and one.row.record.status == "ok"


def _columns(result: Result) -> Iterator[Column]:
    """A row for each entry, the fastest first; those that did not finish come last."""
    order = _order(result)
    predicted, ranks = result.predicted_s, result.predicted_ranks()

    def figures(name: str) -> list[Any]:
        return [one.row.record.metrics.get(name) if one.row.record else None for one in order]

    def column(title: str, cells: Sequence[str], rank: int = 0) -> Iterator[Column]:
        if any(cell != UNKNOWN for cell in cells):
            yield Column(title, list(cells), rank, figure=True)

    yield Column("rank", [str(result.places.get(one.name, UNKNOWN)) for one in order], figure=True)
    yield Column("entry", [one.name for one in order])
    yield Column("status", [one.row.status for one in order])
    yield from column("step time", [_step(one) for one in order])
    reference = result.reference.name if result.reference else ""
    yield from column(f"speed /\n{reference} (95 %)", [str(result.ratios.get(one.name, UNKNOWN)) for one in order])
    yield from column("predicted\nstep time", [seconds(predicted.get(one.name)) for one in order], 1)
    yield from column("predicted\nrank", [str(ranks.get(one.name, UNKNOWN)) for one in order], 2)
    yield from column("samples/s", [rate(value, unit="") for value in figures("throughput")], 4)
    yield from column("tokens/s", [rate(value, unit="") for value in figures("tokens_per_s")], 5)
    yield from column("memory", [size(_largest(value)) for value in figures("peak_memory_bytes")], 3)
    yield from column("MFU", [percent(None if v is None else v / 100) for v in figures("percent_of_peak")], 8)
    yield from column("mesh", [mesh_text(one.row.mesh) for one in order], 6)
    yield from column("micro-\nbatch", [str(one.row.micro_batch_size or UNKNOWN) for one in order], 6)
    yield from column("loss", [one.row.losses for one in order], 7)


def _order(result: Result) -> list[Entry]:
    """The fastest first; those that did not finish come last, as they were entered."""
    return sorted(
        result.entered,
        key=lambda one: one.step_time_s if one.name in result.places else float("inf"),
    )


def _step(one: Entry) -> str:
    return seconds(one.step_time_s) if one.rounds_s else UNKNOWN


def _largest(values: Any) -> float | None:
    return max((value for value in values or () if value is not None), default=None)


def _lines(result: Result, left_out: Sequence[str]) -> Iterator[str]:
    """What the table cannot say: doubts, notes, why entries did not finish, and where the files are."""
    rounds = max((len(one.rounds_s) for one in result.entered), default=0)
    if any(not place.resolved for place in result.places.values()):
        yield "? not resolved: more rounds might part it from others of its rank   -> race.minutes=..., a quiet machine"
    if 0 < rounds < verdict.LEAST_ROUNDS:
        yield f"note: intervals of fewer than {verdict.LEAST_ROUNDS} rounds say little"
    if left_out:
        yield f"no room for: {', '.join(left_out)}"
    if result.tau is not None:
        yield f"Kendall's tau of the predicted order: {number(result.tau)}"
    if result.regret and len(result.finished) > 1:
        chosen, over = result.regret
        yield f"the predicted best, {chosen}, takes {over:.2f} times the step time of the measured best"
    records = [one.row.record for one in result.entered]
    yield from (f"note: {text}" for text in comparison.notes(records))
    for one in result.entered:
        if one.row.record is not None and one.row.record.status != "ok":
            reason = one.row.record.reason.strip().splitlines()[:REASON_LINES]
            yield "\n  ".join([f"{one.name} {one.row.record.status}", *reason])
    took = f"{result.took_s:.0f} s, {result.start_s:.0f} s of them to start"
    ended = "interrupted: the race was not over after " if result.interrupted else ""
    yield f"{ended}{rounds} rounds of {len(result.finished)} entries in {took} ({result.folder})"
