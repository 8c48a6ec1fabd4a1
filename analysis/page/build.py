"""Build the page's HTML from reports, benchmarks, measured records and traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from analysis.bench import race_plot
from analysis.cells import Judged
from analysis.claim_check import SAYS
from analysis.page import accuracy, published, timeline_traces
from analysis.page.links import linked
from analysis.page.papers import Table, figure, paper
from analysis.paper_pages import Picture, Report
from analysis.torchgpipe.traces import Chosen
from harness.core.record import RunRecord

FOLDER = Path(__file__).parent
TEMPLATE = "page.html"


@dataclass(frozen=True)
class Content:
    """All that the page shows; `bench` is bench.json, `measured` has the records that measure predictions, `cells` the
    published figures of each paper and ours."""

    reports: Mapping[str, Report]
    bench: Mapping[str, Any]
    measured: Sequence[RunRecord]
    traces: Sequence[Chosen]
    cells: Mapping[str, Sequence[Judged]] = field(default_factory=dict)


def page(content: Content, folder: Path) -> str:
    """The whole file, which links to tests as from `folder`."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True)
    environment.filters["linked"] = lambda text: linked(text, folder)
    return environment.get_template(TEMPLATE).render(
        css=_file("page.css"),
        claims_js=_file("claims.js"),
        timeline_js=_file("timeline.js"),
        traces=_json(timeline_traces.data(content.traces)),
        groups=timeline_traces.groups(content.traces),
        legend=timeline_traces.legend(content.traces),
        papers=[paper(name, report) for name, report in content.reports.items()],
        race=_race(content.bench.get("race", {})),
        accuracy=_accuracy(content.bench.get("prediction", {}).get("rows", []), content.measured),
        published=published.part(content.cells),
        said=SAYS,
    )


def _race(bench: Mapping[str, Any]) -> dict[str, Any]:
    rows = bench.get("rows", [])
    drawn = race_plot.figure(rows, bench.get("manifest"))
    return {
        "figure": figure("race", "Speed of every engine relative to one device", Picture.of(drawn)) if drawn else None,
        "headline": race_plot.headline(rows),
    }


def _accuracy(rows: Sequence[dict[str, Any]], measured: Sequence[RunRecord]) -> dict[str, Any]:
    drawn, table = accuracy.figure(accuracy.ratios(measured)), accuracy.table(rows)
    return {
        "figure": figure("accuracy", "Simulated / measured step time", Picture.of(drawn)) if drawn else None,
        "headline": accuracy.headline(rows),
        "table": Table.of(table) if table else None,
        "ledger": [Table.of(one) for one in accuracy.ledger_tables(measured)],
    }


def _file(name: str) -> Markup:
    return Markup((FOLDER / name).read_text(encoding="utf-8"))


def _json(value: Any) -> Markup:
    """Escape a value for a script element, in which "</script", and "<script" after "<!--", are more than text."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
