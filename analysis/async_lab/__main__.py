"""Asynchronous pipelines compared, from the sweep `async_lab`: method x optimizer x depth, over seeds.

python -m analysis.async_lab [FOLDER...] [--out FOLDER]        tables; with --out pictures, too
python -m analysis.async_lab --write                           both into docs/results/async_lab.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from analysis import report
from analysis.async_lab.plots import figures
from analysis.async_lab.runs import SWEEPS, load, newest
from analysis.async_lab.tables import PAGE, sections, with_tables
from analysis.plots import style
from analysis.records import sweep_command
from harness.config.registry import ROOT
from harness.core import files
from harness.core.problem import CannotRun


def main(arguments: Sequence[str]) -> int:
    """Returns 2 where there are no records, else 0."""
    parser = argparse.ArgumentParser("python -m analysis.async_lab", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="a sweep; by default the committed ones"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write pictures into it")
    parser.add_argument("--write", action="store_true", help=f"update {PAGE.relative_to(ROOT)} and its pictures")
    options = parser.parse_args(arguments)
    try:
        loaded = newest(load(options.folders))
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    found = sections(loaded)
    if not found:
        print(f"no runs of engine=delayed   -> {sweep_command(SWEEPS[0])}", file=sys.stderr)
        return 2
    report.show(found, Console(width=140, highlight=False))
    print("\n".join(loaded.messages()))
    if options.write:
        files.write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), found))
        print(PAGE)
    folder = PAGE.parents[1] if options.write else options.out
    for name, figure in figures(loaded).items() if folder else ():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"async_lab_{name}.png"
        style.write(figure, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
