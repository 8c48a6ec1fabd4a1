"""`python -m analysis.myelin [FOLDER...] [--write]`: the paper's figures beside ours, a verdict for each claim.

The folders are those of the sweeps myelin_*, at both scales; by default those in runs/.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from analysis import command
from analysis.myelin import picture, tables
from analysis.myelin.rows import LOCAL, PAPER, SWEEPS, Results
from harness import registry

PICTURE = "myelin.png"


def _drawn(results: Results, folder: Path) -> str:
    if not picture.draw(results, folder / PICTURE):
        return ""
    return f"As a picture: [{PICTURE}]({PICTURE})."


PAGE = command.Page(
    module="analysis.myelin",
    about=__doc__ or "",
    path=registry.ROOT / "analysis" / "results" / "myelin.md",
    title="Myelin: paper, simulated, measured in small",
    intro="Made by `python -m analysis.myelin --write` from the records of sweeps/myelin_*.",
    sweeps=[f"myelin_{name}-{scale}" for name, scale in itertools.product(SWEEPS, (PAPER, LOCAL))],
    results=Results,
    sections=tables.sections,
    missing=tables.missing,
    drawn=_drawn,
    width=190,
)

if __name__ == "__main__":
    sys.exit(command.main(PAGE, sys.argv[1:]))
