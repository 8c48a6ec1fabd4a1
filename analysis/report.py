"""Tables with a title and notes, on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

MISSING = "-"


@dataclass(frozen=True)
class Section:
    """A table under a title, with lines of text below; a cell of text is left-aligned, one of a number right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    texts: int = 1
    """The first so many columns are text, and left-aligned."""


def not_run(commands: Sequence[str]) -> str:
    """The commands of sweeps that were not run, or not to their end, one a line; empty without any."""
    lines = [f"    {command}" for command in commands]
    return "\n".join(["Not run yet, and left out:", "", *lines]) if commands else ""


def show(sections: Sequence[Section], console: Console) -> None:
    """Print the sections."""
    for section in sections:
        table = Table(box=None, pad_edge=False)
        for number, column in enumerate(section.columns):
            table.add_column(Text(column), justify="left" if number < section.texts else "right", overflow="fold")
        for row in section.rows:
            table.add_row(*map(Text, row))
        console.print(Text(section.title, style="bold"), table, *map(Text, section.notes), Text(), sep="\n")


def markdown(title: str, intro: str, sections: Sequence[Section]) -> str:
    """The same as a page of Markdown."""
    lines = [f"# {title}", "", intro, ""]
    for section in sections:
        rule = [":--" if number < section.texts else "--:" for number in range(len(section.columns))]
        lines += [f"## {section.title}", "", *map(_line, (section.columns, rule, *section.rows)), ""]
        for note in section.notes:
            lines += [note, ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
