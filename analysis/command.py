"""What `python -m analysis.PAPER [FOLDER...] [--write]` does: tables from records, on the terminal and as a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console

from analysis import records, report
from harness import files
from harness.problem import CannotRun
from harness.record import RunRecord
from harness.serial import SchemaError

Results = TypeVar("Results")
RUNS = Path("runs")


@dataclass(frozen=True)
class Page(Generic[Results]):
    """The report of a paper: `python -m MODULE`, which `--write`s the file `path`.

    `results` are made of the records in the given folders, or in `sweeps`, folders in runs/. `missing` says what has
    not been run. `drawn` draws what there is to draw into a folder, and says so. Lines have `width` letters where there
    is no terminal.
    """

    module: str
    about: str
    path: Path
    title: str
    intro: str
    sweeps: Sequence[str]
    results: Callable[[list[RunRecord]], Results]
    sections: Callable[[Results], Sequence[report.Section]]
    missing: Callable[[Results], str]
    drawn: Callable[[Results, Path], str] = lambda results, folder: ""
    width: int = 150


def main(page: Page[Results], arguments: Sequence[str]) -> int:
    """Returns 2 for folders that cannot be read, else 0."""
    options = _parser(page).parse_args(arguments)
    try:
        found = records.load(options.folders or _default(page.sweeps))
    except (CannotRun, SchemaError) as error:
        print(error, file=sys.stderr)
        return 2
    results = page.results(found)
    sections, missing = page.sections(results), page.missing(results)
    console = Console()
    report.show(sections, console if console.is_terminal else Console(width=page.width))
    if missing:
        print(missing)
    if options.write:
        made = " ".join(filter(None, (page.intro, page.drawn(results, page.path.parent))))
        intro = "\n\n".join(filter(None, (made, missing)))
        files.write_text(page.path, report.markdown(page.title, intro, sections))
        print(f"written to {page.path}")
    return 0


def _default(sweeps: Sequence[str]) -> list[Path]:
    """The sweeps' own folders, those that are there."""
    return [folder for name in sweeps if (folder := RUNS / name).is_dir()]


def _parser(page: Page[Results]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m {page.module}", description=page.about, allow_abbrev=False)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help=f"also write {page.path}")
    return parser
