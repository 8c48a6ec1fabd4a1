"""`python -m analysis.claims [PAPER...]`: every claim of the papers: published, simulated, measured, and its verdict.

The records are the committed ones and those in runs/, as for `python -m analysis.PAPER`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from analysis import claim_check, paper_cli, report
from analysis.paper_pages import PAGES

TITLE = "The papers' claims"
INTRO = "What each paper says, what is simulated or planned at its scale, what was measured, and whether it holds."


def main(arguments: Sequence[str]) -> int:
    """Returns 0; what does not hold is no error."""
    parser = argparse.ArgumentParser("python -m analysis.claims", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("papers", nargs="*", choices=[*PAGES, []], metavar="PAPER", help=", ".join(PAGES))
    paper_cli.add_format(parser)
    options = parser.parse_args(arguments)
    sections = [section(paper) for paper in options.papers or PAGES]
    paper_cli.output(TITLE, INTRO, sections, options.format)
    return 0


def section(paper: str) -> report.Section:
    """The verdicts on a paper's claims, and what of its sweeps was not run."""
    page = PAGES[paper]
    loaded = page.load()
    print("\n".join(f"{paper}: {line}" for line in loaded.messages()), file=sys.stderr)
    results = page.results(loaded.records)
    found = claim_check.section(page.verdicts(results), paper)
    return replace(found, notes=(*found.notes, *filter(None, [page.missing(results)])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
