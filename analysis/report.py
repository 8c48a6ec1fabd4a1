"""Tables with a title and notes: on the terminal, as Markdown, LaTeX (booktabs) and HTML, and as tidy frames."""

from __future__ import annotations

import html as markup
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import pandas

MISSING = "-"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}
_SPECIAL = str.maketrans(_LATEX)


@dataclass(frozen=True)
class Section:
    """A table under a title, with lines of text below; a cell of text is left-aligned, one of a number right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    texts: int = 1
    """The first so many columns are text, and left-aligned."""

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        return html_section(self)

    def frame(self) -> pandas.DataFrame:
        """The cells as they are printed: a row for each row, with the table's columns."""
        import pandas

        return pandas.DataFrame(list(self.rows), columns=list(self.columns))

    def aligned(self, text: str, number: str) -> list[str]:
        """`text` for each column of text, `number` for each other one."""
        return [text if column < self.texts else number for column in range(len(self.columns))]


Page = Callable[[str, str, Sequence[Section]], str]
"""A text from a title, an introduction and sections."""


def not_run(commands: Sequence[str]) -> str:
    """The commands of sweeps that were not run, or not to their end, one a line; empty without any."""
    lines = [f"    {command}" for command in commands]
    return "\n".join(["Not run yet, and left out:", "", *lines]) if commands else ""


def show(sections: Sequence[Section], console: Console) -> None:
    """Print the sections."""
    for section in sections:
        table = Table(box=None, pad_edge=False)
        for column, side in zip(section.columns, section.aligned("left", "right"), strict=True):
            table.add_column(Text(column), justify="left" if side == "left" else "right", overflow="fold")
        for row in section.rows:
            table.add_row(*map(Text, row))
        console.print(Text(section.title, style="bold"), table, *map(Text, section.notes), Text(), sep="\n")


def markdown(title: str, intro: str, sections: Sequence[Section]) -> str:
    """A page of Markdown."""
    lines = [f"# {title}", "", intro, ""]
    for section in sections:
        cells = (section.columns, section.aligned(":--", "--:"), *section.rows)
        lines += [f"## {section.title}", "", *map(_markdown_line, cells), ""]
        for note in section.notes:
            lines += [note, ""]
    return "\n".join(lines)


def latex(title: str, intro: str, sections: Sequence[Section]) -> str:
    r"""A section of LaTeX: tables with their titles as captions; its first line says which packages they need."""
    lines = [r"% \usepackage{longtable,booktabs}", rf"\section{{{_latex(title)}}}", "", *_latex_blocks(intro)]
    for section in sections:
        lines += [
            rf"\begin{{longtable}}{{{''.join(section.aligned('l', 'r'))}}}",
            rf"\caption{{{_latex(section.title)}}}\\",
            r"\toprule",
            _latex_line(section.columns),
            r"\midrule",
            r"\endhead",
            *map(_latex_line, section.rows),
            r"\bottomrule",
            r"\end{longtable}",
            "",
        ]
        lines += [line for note in section.notes for line in _latex_blocks(note)]
    return "\n".join(lines)


def html(title: str, intro: str, sections: Sequence[Section]) -> str:
    """A fragment of HTML: a heading, and `html_section` of each."""
    lines = [f"<h1>{markup.escape(title)}</h1>", *paragraphs([intro])]
    return "\n".join([*lines, *map(html_section, sections), ""])


def html_section(section: Section) -> str:
    """A heading, and `html_table`."""
    return f"<h2>{markup.escape(section.title)}</h2>\n{html_table(section)}"


def html_table(section: Section) -> str:
    """A table whose cells of numbers have the class "number", and paragraphs; without the title."""
    kinds = section.aligned("", ' class="number"')
    lines = [
        '<div class="table">',
        "<table>",
        "<thead>",
        _html_line("th", section.columns, kinds),
        "</thead>",
        "<tbody>",
        *(_html_line("td", row, kinds) for row in section.rows),
        "</tbody>",
        "</table>",
        "</div>",
        *paragraphs(section.notes),
    ]
    return "\n".join(lines)


def paragraphs(texts: Iterable[str]) -> list[str]:
    """Paragraphs of HTML; commands, which are indented, are preformatted."""
    blocks = (block for text in texts for block in text.split("\n\n") if block)
    tags = ((block, "pre" if block.startswith(" ") else "p") for block in blocks)
    return [f"<{tag}>{markup.escape(block)}</{tag}>" for block, tag in tags]


FORMATS: dict[str, Page] = {"markdown": markdown, "latex": latex, "html": html}


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _latex(text: str) -> str:
    return text.translate(_SPECIAL)


def _latex_line(cells: Sequence[str]) -> str:
    return rf"{' & '.join(map(_latex, cells))} \\"


def _html_line(tag: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    kept = (markup.escape(cell.replace(" %", "\N{NO-BREAK SPACE}%")) for cell in cells)
    tagged = (f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(kept, kinds, strict=True))
    return f"<tr>{''.join(tagged)}</tr>"


def _latex_blocks(text: str) -> list[str]:
    """Commands, which are indented, are verbatim; an empty line after each block."""
    blocks = [block for block in text.split("\n\n") if block]
    verbatim = (rf"\begin{{verbatim}}{chr(10)}{block}{chr(10)}\end{{verbatim}}" for block in blocks)
    texts = (code if block.startswith(" ") else _latex(block) for block, code in zip(blocks, verbatim, strict=True))
    return [line for block in texts for line in (block, "")]
