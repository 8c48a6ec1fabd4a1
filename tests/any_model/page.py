"""The page of `python -m tests.any_model`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.any_model.cases import COLUMNS, Case, Column
from tests.matrix import End

if TYPE_CHECKING:
    from tests.any_model.chain import Chain


@dataclass(frozen=True)
class Cell:
    """How a run ended; of one whose losses are compared the greatest difference, relative to the plain loop's."""

    end: End
    difference: float | None = None

    @property
    def text(self) -> str:
        """What is to be said of it: a difference, or what the run said."""
        return self.end.said if self.difference is None or self.end.broken else f"{self.difference:.0e}"


@dataclass(frozen=True)
class Model:
    """The layers of a case, and how unequal two stages of them are: 0.2 is 20 % above the mean. None: it never ran."""

    chain: Chain
    imbalance: float | None


def page(cells: Mapping[tuple[Case, Column], Cell], models: Mapping[Case, Model]) -> str:
    """The Markdown page: a table of engines, one of layers, both for the twelve models and for further ones."""
    notes: list[str] = []
    first = [case for case in models if not case.further]
    further = [case for case in models if case.further]
    refused = sum(cells[key].end.status == "infeasible" for key in cells if not key[0].further)
    total = sum(not case.further for case, _ in cells)
    lines = [
        "# Any model in every engine", "",
        "Made by `make matrix` from tests/any_model: networks of Hugging Face and of torchvision, and an LSTM, none of",
        "them of the zoo, three steps on two CPU devices. A plain loop over the module itself has the same samples,",
        "micro-batches and optimizer. A cell is the greatest difference of a loss, relative to that of the loop: in",
        "float64 at most 1e-9; with ZeRO 2, in float32, 1e-5 in the first two steps. A number in brackets is a",
        "refusal; the notes have its reason and its fix.",
        f"Of the {total} cells of the first twelve models {refused} are refused.",
        "",
        *table(cells, first, notes), "",
        "How their layers suit a pipeline: a layer of its own for each block that repeats (one block may be opened, so",
        "that two stages can be balanced), and the FLOPs of the slower of two stages above the mean:", "",
        *layers(models, first),
    ]  # fmt: skip
    if further:
        lines += ["", "Further models:", "", *table(cells, further, notes), "", *layers(models, further)]
    if notes:
        lines += ["", "Notes:", "", *(f"{number}. `{note}`" for number, note in enumerate(notes, start=1))]
    return "\n".join(lines) + "\n"


def table(cells: Mapping[tuple[Case, Column], Cell], rows: list[Case], notes: list[str]) -> list[str]:
    """A row for each model, a column for each engine; adds what they said to `notes`."""
    columns = [column for column in COLUMNS if any((case, column) in cells for case in rows)]
    body = [[case.name, *(_short(cells[case, column], notes) for column in columns)] for case in rows]
    return _lines(["", *(column.name for column in columns)], body)


def layers(models: Mapping[Case, Model], rows: list[Case]) -> list[str]:
    """How the layers of each model suit a pipeline."""
    body = []
    for case in rows:
        chain = models[case].chain
        blocks = f"{chain.blocks} `{case.block}`"
        opened = chain.blocks - chain.whole
        cut = "no" if not chain.cut_at_every_block else f"yes, {opened} opened" if opened else "yes"
        unequal = models[case].imbalance
        body.append([case.name, str(chain.layers), blocks, cut, "" if unequal is None else f"{unequal:.1%}"])
    return _lines(["", "layers", "blocks", "a cut at every block", "two stages"], body)


def _short(cell: Cell, notes: list[str]) -> str:
    """What stands in a cell."""
    if cell.end.status == "ok":
        return cell.text
    note = f"{cell.end.status}, {cell.end.said}" if cell.end.broken else re.sub(r"^\S+ \S+: ", "", cell.end.said)
    note = " ".join(note.split())
    if note not in notes:
        notes.append(note)
    number = f"({notes.index(note) + 1})"
    return f"**broken** {number}" if cell.end.broken else number


def _lines(heads: list[str], body: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *body)]
