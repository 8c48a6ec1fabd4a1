"""A paper's part of the page: its figures, tables and claims."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from analysis.claim_check import Verdict
from analysis.paper_data import Claim, claims
from analysis.paper_pages import Picture, Report
from analysis.report import Section, html_table, paragraphs

NARROW_PX = 800
"""Figures of at most so many pixels share a line."""


@dataclass(frozen=True)
class Figure:
    """A picture with all its bytes in its address; `caption` is empty where the picture says it."""

    name: str
    alt: str
    caption: str
    uri: str
    width: int
    height: int

    @property
    def narrow(self) -> bool:
        return self.width <= NARROW_PX


@dataclass(frozen=True)
class Table:
    """A table under a title that opens it."""

    title: str
    html: Markup

    @classmethod
    def of(cls, section: Section) -> Table:
        return cls(section.title, Markup(html_table(section)))


@dataclass(frozen=True)
class Paper:
    """A paper's part of the page."""

    name: str
    title: str
    verdicts: Sequence[Verdict]
    tables: Sequence[Table]
    figures: Sequence[Figure]
    notes: Markup

    @property
    def held(self) -> int:
        """Number of claims that hold, those proven by tests included."""
        return sum(one.says in ("holds", "by tests") for one in self.verdicts)

    @property
    def tested(self) -> int:
        return sum(one.says == "by tests" for one in self.verdicts)

    @property
    def open(self) -> int:
        return sum(one.says == "not run" for one in self.verdicts)

    def why(self, verdict: Verdict) -> str:
        """Return the reason of a verdict, or the first claim with the same reason."""
        first = next(one for one in self.verdicts if one.reason == verdict.reason)
        return verdict.reason if first == verdict or not verdict.reason else f"as for {first.id}"

    def claim(self, verdict: Verdict) -> Claim:
        """Where the paper has the claim, and the condition under which it holds."""
        return next(one for one in claims(self.name) if one.id == verdict.id)


def paper(name: str, report: Report) -> Paper:
    tables = [section for section in report.sections if section.title != report.claims().title]
    figures = [_titled(key, _label(key, tables), picture) for key, picture in report.pictures().items()]
    notes = Markup("\n".join(paragraphs([*report.messages, report.missing])))
    return Paper(name, report.title, report.verdicts, [*map(Table.of, tables)], figures, notes)


def figure(name: str, alt: str, picture: Picture, caption: str = "") -> Figure:
    """A figure; its own title is better than `alt`."""
    uri = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
    return Figure(name, picture.title or alt, caption, uri, picture.width, picture.height)


def _titled(name: str, label: str, picture: Picture) -> Figure:
    """A figure with `label` as its caption where it has no title."""
    return figure(name, label, picture, "" if picture.title else label)


def _label(key: str, tables: Sequence[Section]) -> str:
    """The title of the table of the same number, else its name there: Fig. 5 for myelin_fig5."""
    label = re.sub(r"fig(?=\d)", "Fig. ", re.sub(r"table(?=\d)", "Table ", key.partition("_")[2]))
    return next((one.title for one in tables if re.match(rf"{re.escape(label)}\b", one.title)), label)
