"""`python -m analysis.page [--out FILE.html]`: the report page, from the committed records and those in runs/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import paper_pages
from analysis.bench import results
from analysis.page.build import page
from analysis.torchgpipe import traces
from harness.config import registry
from harness.core import files, units

OUT = registry.ROOT / "build" / "report.html"


def main(arguments: Sequence[str]) -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser("python -m analysis.page", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE.html")
    out = parser.parse_args(arguments).out
    reports = {name: paper_pages.report(name) for name in paper_pages.PAGES}
    chosen = [trace for sweep in traces.TITLES for trace in traces.load(sweep)]
    text = page(reports, results.load().get("race", {}), chosen)
    files.write_text(out, text)
    print(f"{out}: {units.size(len(text.encode()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
