"""Absolute figures that papers print, next to what our records predict for them: ratios, their mean and spread.

`paper_cells/PAPER.csv` has notes on them: a reason why cells miss, and the constant that was fitted on cells. A note is
for one row of a table's quantity, or, with an empty row, for all of them.
"""

from __future__ import annotations

import csv
import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NOTES = Path(__file__).parent / "paper_cells"


@dataclass(frozen=True)
class Cell:
    """A published figure and the predicted one, both in the unit that `quantity` names; None: not in the records."""

    table: str
    quantity: str
    row: str
    published: float
    predicted: float | None

    @property
    def ratio(self) -> float | None:
        """Predicted / published."""
        return None if self.predicted is None else self.predicted / self.published


@dataclass(frozen=True)
class Note:
    """A line of paper_cells/PAPER.csv: `fitted` is the constant that was fitted on the cells, `reason` why they miss.

    Either may be empty.
    """

    table: str
    quantity: str
    row: str
    fitted: str
    reason: str

    def is_on(self, cell: Cell) -> bool:
        return (self.table, self.quantity) == (cell.table, cell.quantity) and self.row in ("", cell.row)


@dataclass(frozen=True)
class Judged:
    """A cell with its notes."""

    cell: Cell
    fitted: str
    reason: str

    @property
    def ratio(self) -> float | None:
        return self.cell.ratio

    @property
    def miss(self) -> float:
        """How far the prediction is off, as a factor of at least 1; 0 where there is none."""
        ratio = self.ratio
        return max(ratio, 1 / ratio) if ratio else 0.0


@dataclass(frozen=True)
class Group:
    """The cells of a table's quantity. Mean and spread leave out the cells that a constant was fitted on."""

    table: str
    quantity: str
    cells: Sequence[Judged]

    @property
    def ratios(self) -> list[float]:
        """Predicted / published of the cells that count."""
        return [one.ratio for one in self.cells if one.ratio and not one.fitted]

    @property
    def fitted(self) -> int:
        return sum(bool(one.fitted) for one in self.cells)

    @property
    def not_predicted(self) -> int:
        return sum(one.ratio is None for one in self.cells)

    @property
    def worst(self) -> Judged | None:
        """The cell that misses most, fitted or not."""
        return max((one for one in self.cells if one.miss), key=lambda one: one.miss, default=None)


def mean(ratios: Sequence[float]) -> float | None:
    """Geometric mean; None without any."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None


def spread(ratios: Sequence[float]) -> float | None:
    """Geometric standard deviation, a factor of at least 1; None of less than two."""
    return math.exp(statistics.stdev(map(math.log, ratios))) if len(ratios) > 1 else None


@functools.cache
def notes(paper: str) -> tuple[Note, ...]:
    """The notes on a paper's cells; none without a file."""
    path = NOTES / f"{paper}.csv"
    if not path.is_file():
        return ()
    with path.open(encoding="utf-8", newline="") as opened:
        return tuple(Note(**row) for row in csv.DictReader(opened))


def judged(cells: Iterable[Cell], known: Sequence[Note]) -> Iterator[Judged]:
    """Each cell with its notes, those of its own row before those of all rows."""
    for cell in cells:
        own = sorted((note for note in known if note.is_on(cell)), key=lambda note: not note.row)
        fitted, reason = (next((text for text in texts if text), "") for texts in _columns(own))
        yield Judged(cell, fitted, reason)


def groups(cells: Iterable[Judged]) -> list[Group]:
    """The cells by table and quantity, in the order of the first cell of each."""
    found: dict[tuple[str, str], list[Judged]] = {}
    for one in cells:
        found.setdefault((one.cell.table, one.cell.quantity), []).append(one)
    return [Group(*names, own) for names, own in found.items()]


def compared(table: str, quantity: str, figures: Mapping[str, tuple[float | None, float | None]]) -> Iterator[Cell]:
    """Cells of a table's quantity: (published, predicted) by row; a row that the paper leaves out has no cell."""
    for row, (published, predicted) in figures.items():
        if published is not None:
            yield Cell(table, quantity, row, published, predicted)


def billions(count: float | None) -> float | None:
    """A count in 1e9."""
    return None if count is None else count / 1e9


def _columns(own: Sequence[Note]) -> tuple[list[str], list[str]]:
    return [note.fitted for note in own], [note.reason for note in own]
