"""Tables whose columns are left out where a terminal is too narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.align import Align
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from harness.core.plan import Mesh
from harness.core.units import UNKNOWN

GAP = 2
"""Between two columns."""
MESH_LEGEND = "mesh: pipeline x data x tensor parallel size"


@dataclass(frozen=True)
class Column:
    """`title` may have two lines. One that has nothing to show has no column; one with a `rank` is left out, the
    highest first, where the table is too wide."""

    title: str
    cells: list[str]
    rank: int = 0
    figure: bool = False

    @property
    def width(self) -> int:
        """With the space to the next column."""
        return max(map(cell_len, (*self.title.split("\n"), *self.cells))) + GAP

    @property
    def shows(self) -> bool:
        """Whether any cell has something to show."""
        return any(cell != UNKNOWN for cell in self.cells)

    @property
    def name(self) -> str:
        """The title in one line."""
        return self.title.replace("-\n", "-").replace("\n", " ")


def drawn(columns: Sequence[Column], width: int) -> tuple[Table, list[str]]:
    """The columns for which there is room as a table, and the names of the others."""
    shown = _fitting(columns, width + GAP)
    made = Table(box=None, pad_edge=False)
    for column in shown:
        if column.figure:
            made.add_column(_bottom(column.title, "right"), justify="right", no_wrap=True)
        else:
            made.add_column(_bottom(column.title), overflow="fold")
    for cells in zip(*(column.cells for column in shown), strict=True):
        made.add_row(*map(Text, cells))
    return made, [column.name for column in columns if column not in shown]


def _bottom(title: str, to: Literal["left", "right"] = "left") -> Align:
    return Align(Text(title, justify=to), to, vertical="bottom")


def _fitting(columns: Sequence[Column], room: int) -> list[Column]:
    """The columns without a rank, and those of the lowest ranks for which there is room."""
    kept = [column for column in columns if not column.rank]
    for column in sorted(columns, key=lambda one: one.rank):
        if column.rank and sum(one.width for one in (*kept, column)) <= room:
            kept.append(column)
    return [column for column in columns if column in kept]


def mesh_text(mesh: Mesh | None) -> str:
    """2x1x1: pipeline x data x tensor."""
    return f"{mesh.pipeline}x{mesh.data}x{mesh.tensor}" if mesh else UNKNOWN
