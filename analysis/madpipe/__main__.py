"""`python -m analysis.madpipe [FOLDER...] [--write]`: the paper's figures beside ours, a verdict for each claim.

The folders are those of the sweeps madpipe_fig6 to madpipe_fig8; by default those in runs/.
"""

from __future__ import annotations

import sys
from pathlib import Path

from analysis import command
from analysis.madpipe import picture, tables
from analysis.madpipe.rows import SWEEPS, Results
from harness import registry

PICTURE = "madpipe_fig6.png"


def _drawn(results: Results, folder: Path) -> str:
    if not picture.draw(results, folder / PICTURE):
        return ""
    return f"Figure 6 as a picture: [{PICTURE}]({PICTURE}) (solid: schedules; dashed: what the first phase hopes for)."


PAGE = command.Page(
    module="analysis.madpipe",
    about=__doc__ or "",
    path=registry.ROOT / "analysis" / "results" / "madpipe.md",
    title="MadPipe: planned",
    intro="Made by `python -m analysis.madpipe --write` from the records of sweeps/madpipe_fig6 to madpipe_fig8.",
    sweeps=[f"madpipe_{name}" for name in SWEEPS],
    results=Results,
    sections=tables.sections,
    missing=tables.missing,
    drawn=_drawn,
    width=190,
)

if __name__ == "__main__":
    sys.exit(command.main(PAGE, sys.argv[1:]))
