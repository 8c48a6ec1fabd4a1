"""`python -m analysis.autoddl [FOLDER...] [--write]`: the paper's figures beside ours, a verdict for each claim.

The folders are those of the sweeps autoddl_fig3 to autoddl_table3; by default those in runs/.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import command
from analysis.autoddl import search, tables
from analysis.autoddl.rows import SWEEPS, Results
from harness import registry

RESULTS = registry.ROOT / "analysis" / "results" / "autoddl.md"
PICTURE = "autoddl_fig8.png"


def main(arguments: Sequence[str]) -> int:
    """Returns 2 for folders that cannot be read, else 0."""
    page = command.Page(
        "analysis.autoddl",
        __doc__ or "",
        RESULTS,
        "AutoDDL: paper, planned, simulated, measured",
        "Made by `python -m analysis.autoddl --write` from the records of sweeps/autoddl_fig3 to autoddl_table3.",
        [f"autoddl_{name}" for name in SWEEPS],
        Results,
        tables.sections,
        tables.missing,
        _drawn,
        width=170,
    )
    return command.main(page, arguments)


def _drawn(results: Results, folder: Path) -> str:
    return f"Figure 8 as a picture: [{PICTURE}]({PICTURE})." if search.draw(results, folder / PICTURE) else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
