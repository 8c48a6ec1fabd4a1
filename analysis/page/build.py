"""Build the page's HTML from reports, the race and traces."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from analysis.bench import race_plot
from analysis.claim_check import SAYS, Verdict
from analysis.page import timeline_traces
from analysis.paper_pages import Picture, Report
from analysis.report import html_section, paragraphs
from analysis.torchgpipe.traces import Chosen

FOLDER = Path(__file__).parent
TEMPLATE = "page.html"
COLUMNS = ("claim", "verdict", "what the paper says", "paper", "simulated", "measured", "why")


@dataclass(frozen=True)
class Figure:
    """A picture with all its bytes in its address."""

    name: str
    caption: str
    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Paper:
    """A paper's part of the page."""

    name: str
    title: str
    verdicts: Sequence[Verdict]
    tables: Sequence[Markup]
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


def page(reports: Mapping[str, Report], race: Mapping[str, Any], traces: Sequence[Chosen]) -> str:
    """The whole file; `race` has the "rows" and the "manifest" of that benchmark, or nothing."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True)
    environment.filters["breakable"] = _breakable
    return environment.get_template(TEMPLATE).render(
        css=_file("page.css"),
        claims_js=_file("claims.js"),
        timeline_js=_file("timeline.js"),
        traces=_json(timeline_traces.data(traces)),
        groups=timeline_traces.groups(traces),
        legend=timeline_traces.legend(traces),
        papers=[_paper(name, report) for name, report in reports.items()],
        race=_race(race.get("rows", []), race.get("manifest")),
        said=SAYS,
        claim_columns=COLUMNS,
    )


def _paper(name: str, report: Report) -> Paper:
    tables = [Markup(html_section(section)) for section in report.sections if section.title != report.claims().title]
    figures = [_figure(key, _caption(report.title, key), picture) for key, picture in report.pictures().items()]
    notes = Markup("\n".join(paragraphs([*report.messages, report.missing])))
    return Paper(name, report.title, report.verdicts, tables, figures, notes)


def _caption(title: str, key: str) -> str:
    """Myelin, Figure 5 for myelin_fig5."""
    return f"{title}, {key.partition('_')[2].replace('fig', 'Figure ').replace('table', 'Table ')}"


def _figure(name: str, caption: str, picture: Picture) -> Figure:
    uri = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
    return Figure(name, caption, uri, picture.width, picture.height)


def _race(rows: Sequence[dict[str, Any]], manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    drawn = race_plot.figure(rows, manifest)
    figures = [_figure("race", "The race", Picture.of(drawn))] if drawn else []
    return {"figures": figures, "headline": race_plot.headline(rows)}


def _breakable(text: str) -> Markup:
    """Insert places where a line may break into the names of tests."""
    return Markup(re.sub(r"tests/\S+", lambda name: re.sub(r"(::|[/_])", r"\1<wbr>", name[0]), str(escape(text))))


def _file(name: str) -> Markup:
    return Markup((FOLDER / name).read_text(encoding="utf-8"))


def _json(value: Any) -> Markup:
    """Escape a value for a script element, in which "</script", and "<script" after "<!--", are more than text."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
