"""`python -m analysis.torchgpipe [FOLDER...] [--write]`: the paper's tables beside ours, a verdict for each claim.

The folders are those of the sweeps torchgpipe_table1 to torchgpipe_table4, at both scales; by default those in runs/.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from analysis import records, report
from analysis.torchgpipe import tables
from analysis.torchgpipe.rows import ROWS, SOURCE, Results
from harness import files, registry
from harness.problem import CannotRun
from harness.serial import SchemaError

RESULTS = registry.ROOT / "analysis" / "results" / "torchgpipe.md"
TITLE = "torchgpipe: paper, simulated, measured"
INTRO = "Made by `python -m analysis.torchgpipe --write` from the records of sweeps/torchgpipe_table1 to table4."
WIDTH = 150


def main(arguments: Sequence[str]) -> int:
    """Returns 2 for folders that cannot be read, else 0."""
    options = _parser().parse_args(arguments)
    try:
        found = records.load(options.folders or _default())
    except (CannotRun, SchemaError) as error:
        print(error, file=sys.stderr)
        return 2
    results = Results(found)
    sections, missing = tables.sections(results), tables.missing(results)
    console = Console()
    report.show(sections, console if console.is_terminal else Console(width=WIDTH))
    if missing:
        print(missing)
    if options.write:
        files.write_text(RESULTS, report.markdown(TITLE, " ".join(filter(None, [INTRO, missing])), sections))
        print(f"written to {RESULTS}")
    return 0


def _default() -> list[Path]:
    """The sweeps' own folders, those that are there."""
    names = [f"torchgpipe_table{table}-{scale}" for table, scale in itertools.product(ROWS, SOURCE)]
    return [folder for name in names if (folder := Path("runs") / name).is_dir()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m analysis.torchgpipe", description=__doc__, allow_abbrev=False)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS}")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
