"""`python -m analysis.autoddl [FOLDER...] [--write]`: the paper's figures beside ours, a verdict for each claim.

The folders are those of the sweeps autoddl_fig3 to autoddl_table3; by default those in runs/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from analysis import records, report
from analysis.autoddl import search, tables
from analysis.autoddl.rows import SWEEPS, Results
from harness import files, registry
from harness.problem import CannotRun
from harness.serial import SchemaError

RESULTS = registry.ROOT / "analysis" / "results" / "autoddl.md"
PICTURE = "autoddl_fig8.png"
TITLE = "AutoDDL: paper, planned, simulated, measured"
INTRO = "Made by `python -m analysis.autoddl --write` from the records of sweeps/autoddl_fig3 to autoddl_table3."
WIDTH = 170


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
        _write(results, sections, missing)
    return 0


def _write(results: Results, sections: Sequence[report.Section], missing: str) -> None:
    intro = [INTRO, missing]
    if search.draw(results, RESULTS.parent / PICTURE):
        intro.append(f"Figure 8 as a picture: [{PICTURE}]({PICTURE}).")
    files.write_text(RESULTS, report.markdown(TITLE, " ".join(filter(None, intro)), sections))
    print(f"written to {RESULTS}")


def _default() -> list[Path]:
    """The sweeps' own folders, those that are there."""
    return [folder for name in SWEEPS if (folder := Path("runs") / f"autoddl_{name}").is_dir()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m analysis.autoddl", description=__doc__, allow_abbrev=False)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS}")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
