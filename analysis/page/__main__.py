"""`python -m analysis.page [--out FILE.html]`: the report page, from the committed records and those in runs/.

It says on stderr what it does; it takes half a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from analysis import paper_pages, published, scheme_comparison
from analysis.bench import results
from analysis.page.build import Content, page
from analysis.torchgpipe import traces
from harness.config import registry
from harness.core import files, units
from harness.core.record import RunRecord
from harness.report.progress import Progress

OUT = registry.ROOT / "build" / "report.html"


def main(arguments: Sequence[str]) -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser("python -m analysis.page", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE.html")
    out = parser.parse_args(arguments).out
    with Progress(Console(stderr=True)) as progress:
        content = _content(progress)
        progress.phase(
            "drawing", f"the figures of {', '.join(content.reports)} and the race; {len(content.traces)} traces"
        )
        text = page(content, out.resolve().parent)
        progress.phase("writing", str(out))
        files.write_text(out, text)
    print(f"{out}: {units.size(len(text.encode()))}")
    return 0


def _content(progress: Progress) -> Content:
    reports: dict[str, paper_pages.Report] = {}
    records: list[RunRecord] = []
    for name, paper in paper_pages.PAGES.items():
        progress.phase("reading", f"the records of {name}")
        loaded = paper.load()
        progress.phase("checking", f"the claims of {name}, {len(loaded.records)} records")
        reports[name] = paper_pages.report(name, loaded)
        records += loaded.records
    progress.phase("reading", "benchmarks, traces, and the records of all schemes")
    records += scheme_comparison.load("measured").records
    chosen = [trace for sweep in traces.TITLES for trace in traces.load(sweep)]
    measured = [one for one in records if one.source == "measured"]
    cells = {name: published.judged(name, report.results) for name, report in reports.items()}
    return Content(reports, results.load(), measured, chosen, cells)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
