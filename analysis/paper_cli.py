"""The command `python -m analysis.PAPER [SOURCE...]`: tables from records, on the terminal and as a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.console import Console

from analysis import pack, records, report
from analysis.cells import Cell
from analysis.claim_check import Verdict
from analysis.match_records import Points
from analysis.plots import style
from analysis.records import sweep_command
from harness.config import record_shape
from harness.core import files
from harness.core.problem import CannotRun
from harness.core.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = TypeVar("Results", bound=Points[Any])
WIDTH = 120
"""Letters in a line where there is no terminal."""


@dataclass(frozen=True)
class Page(Generic[Results]):
    """The report of a paper: `python -m MODULE`, which `--write`s the file `path`.

    `results` are made of records, by default those of `sweeps`, folders in runs/, and of their archives. `missing` says
    what has not been run. `figures` are drawn by name, None where they were not run. `cells` are the absolute figures
    that the paper prints and ours for them; MadPipe prints none.
    """

    module: str
    about: str
    path: Path
    title: str
    intro: str
    sweeps: Sequence[str]
    results: Callable[[Sequence[RunRecord]], Results]
    sections: Callable[[Results], Sequence[report.Section]]
    verdicts: Callable[[Results], Sequence[Verdict]]
    missing: Callable[[Results], str]
    figures: Mapping[str, Callable[[Results], Figure | None]]
    cells: Callable[[Results], Sequence[Cell]] = lambda results: ()

    def load(self, sources: Sequence[str] = ()) -> records.Loaded:
        """The records of `sources`; by default those of the committed archives and of runs/. Raises CannotRun."""
        folders = [folder for name in self.sweeps if (folder := pack.RUNS / name).is_dir()]
        return records.load(sources or [*pack.archives_of_sweeps(self.sweeps), *folders], record_shape.check_complete)


def main(page: Page[Results], arguments: Sequence[str]) -> int:
    """Returns 2 for sources that are not there or have no records, else 0."""
    options = _parser(page).parse_args(arguments)
    try:
        loaded = page.load(options.sources)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(loaded.messages()), file=sys.stderr)
    if options.sources and not loaded.records:
        print("\n".join(["the records of this paper are made by", *_commands(page)]), file=sys.stderr)
        return 2
    results = page.results(loaded.records)
    if options.sources and (others := results.others()):
        print(f"of no sweep of this paper, and left out: {others}; its sweeps:", file=sys.stderr)
        print("\n".join(_commands(page)), file=sys.stderr)
    sections, missing = page.sections(results), page.missing(results)
    if options.format:
        intro = "\n\n".join(filter(None, (page.intro, missing)))
        print(report.FORMATS[options.format](page.title, intro, sections))
    else:
        show(sections)
        if missing:
            print(missing)
    if options.write:
        made = " ".join(filter(None, (page.intro, style.drawn(page.figures, results, page.path.parent))))
        intro = "\n\n".join(filter(None, (made, missing)))
        files.write_text(page.path, report.markdown(page.title, intro, sections))
        print(f"written to {page.path}", file=sys.stderr)
    return 0


def show(sections: Sequence[report.Section]) -> None:
    """Print the sections on the terminal; where there is none, `WIDTH` letters wide, without spaces at the ends."""
    console = Console()
    if console.is_terminal:
        report.show(sections, console)
        return
    with (plain := Console(width=WIDTH)).capture() as captured:
        report.show(sections, plain)
    print("\n".join(line.rstrip() for line in captured.get().split("\n")), end="")


def output(title: str, intro: str, sections: Sequence[report.Section], form: str | None) -> None:
    """Print the sections in the format that `--format` asks for, in plain text by default."""
    if form:
        print(report.FORMATS[form](title, intro, sections))
    else:
        show(sections)


def add_format(parser: argparse.ArgumentParser) -> None:
    """`--format`, as all commands that print tables have it."""
    parser.add_argument("--format", choices=report.FORMATS, help="print it in this format, in place of plain text")


def _commands(page: Page[Results]) -> list[str]:
    return [f"    {made}" for name in page.sweeps if (made := sweep_command(name))]


def _parser(page: Page[Results]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m {page.module}", description=page.about, allow_abbrev=False)
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="only these records: a folder, an archive (*.jsonl.gz), wandb:FOLDER or wandb:ENTITY/PROJECT; "
        "by default the committed archives, then runs/",
    )
    add_format(parser)
    parser.add_argument("--write", action="store_true", help=f"also write {page.path}")
    return parser
