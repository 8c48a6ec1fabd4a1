"""The four papers, as notebooks and the report page show them: tables, figures and verdicts from the same records."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from analysis.autoddl.page import PAGE as AUTODDL
from analysis.claim_check import Verdict, section
from analysis.madpipe.page import PAGE as MADPIPE
from analysis.myelin.page import PAGE as MYELIN
from analysis.paper_cli import Page
from analysis.records import Loaded
from analysis.report import Section, html_section, paragraphs
from analysis.torchgpipe.page import PAGE as TORCHGPIPE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGES: dict[str, Page[Any]] = {
    "torchgpipe": TORCHGPIPE,
    "myelin": MYELIN,
    "madpipe": MADPIPE,
    "autoddl": AUTODDL,
}


@dataclass(frozen=True)
class Picture:
    """A figure as the bytes of a PNG, `width` x `height` pixels; notebooks show it. `title` is what it has above it."""

    png: bytes = field(repr=False)
    width: int
    height: int
    title: str = ""

    @classmethod
    def of(cls, figure: Figure) -> Picture:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=figure.dpi)
        width, height = (round(side * figure.dpi) for side in figure.get_size_inches())
        axes = figure.get_axes()
        title = figure.get_suptitle() or (axes[0].get_title() if len(axes) == 1 else "")
        return cls(buffer.getvalue(), width, height, title)

    def _repr_png_(self) -> bytes:
        return self.png


@dataclass(frozen=True)
class Tables:
    """Tables one below the other, as notebooks show them."""

    sections: Sequence[Section] = field(repr=False)

    def _repr_html_(self) -> str:
        return "\n".join(map(html_section, self.sections))


@dataclass(frozen=True)
class Missing:
    """Stands for a table or figure that has not been run: its `name`, and the commands that run it."""

    name: str
    why: str

    def _repr_html_(self) -> str:
        return "\n".join(paragraphs([f"{self.name} has not been run.", self.why]))


@dataclass(frozen=True)
class Report:
    """Everything to show of a paper; `messages` says from which records."""

    title: str
    messages: Sequence[str]
    sections: Sequence[Section]
    verdicts: Sequence[Verdict]
    missing: str
    results: Any
    page: Page[Any]

    def tables(self, start: str) -> Tables | Missing:
        """The tables whose title begins with these words."""
        found = [one for one in self.sections if re.match(rf"{re.escape(start)}\b", one.title)]
        return Tables(found) if found else Missing(start, self.missing)

    def claims(self) -> Section:
        """All verdicts."""
        return section(self.verdicts)

    def picture(self, name: str) -> Picture | Missing:
        """A figure by its name."""
        figure = self.page.figures[name](self.results)
        return Picture.of(figure) if figure else Missing(name, self.missing)

    def pictures(self) -> dict[str, Picture]:
        """All figures that have been run, by name."""
        drawn = {name: draw(self.results) for name, draw in self.page.figures.items()}
        return {name: Picture.of(figure) for name, figure in drawn.items() if figure}


def report(name: str, loaded: Loaded | None = None) -> Report:
    """The report of a paper; by default from the committed records and those in runs/."""
    page = PAGES[name]
    loaded = loaded or page.load()
    results = page.results(loaded.records)
    verdicts = page.verdicts(results)
    title = page.title.partition(":")[0]
    return Report(title, loaded.messages(), page.sections(results), verdicts, page.missing(results), results, page)
