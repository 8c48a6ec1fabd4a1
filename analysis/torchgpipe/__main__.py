"""`python -m analysis.torchgpipe [FOLDER...] [--write]`: the paper's tables beside ours, a verdict for each claim.

The folders are those of the sweeps torchgpipe_table1 to torchgpipe_table4, at both scales; by default those in runs/.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from analysis import command
from analysis.torchgpipe import tables
from analysis.torchgpipe.rows import ROWS, SOURCE, Results
from harness import registry

RESULTS = registry.ROOT / "analysis" / "results" / "torchgpipe.md"


def main(arguments: Sequence[str]) -> int:
    """Returns 2 for folders that cannot be read, else 0."""
    page = command.Page(
        "analysis.torchgpipe",
        __doc__ or "",
        RESULTS,
        "torchgpipe: paper, simulated, measured",
        "Made by `python -m analysis.torchgpipe --write` from the records of sweeps/torchgpipe_table1 to table4.",
        [f"torchgpipe_table{table}-{scale}" for table, scale in itertools.product(ROWS, SOURCE)],
        Results,
        tables.sections,
        tables.missing,
    )
    return command.main(page, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
