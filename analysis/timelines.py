"""Timelines of several runs, one below the other, on the same axis:

    python -m analysis.timelines RUN_DIR [RUN_DIR ...] --out FILE.png [--step K] [--titles "A,B"]

A sweep's folder means all its points, in the order in which they started. A measured run with a simulated trace gets a
second panel. So torchgpipe's Figure 7, what each component adds (section 4.1), is

    python run.py -m +sweeps=torchgpipe_table1 scale=paper
    python -m analysis.timelines runs/torchgpipe_table1-paper --out docs/figure7.png \\
        --titles "baseline,dep-x-x,dep-str-x,dep-str-ptl"
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.run_folders import NoRun, Run, listed, load, titled
from harness.core.problem import Problem, line
from harness.core.run_files import SIMULATED
from harness.core.trace import Trace
from harness.report.timeline_plot import draw_panels


class NoTrace(NoRun):
    """A folder without the trace that is asked for; says what to do."""


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 2 where nothing could be drawn; says why on stderr."""
    parser = argparse.ArgumentParser("python -m analysis.timelines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.png")
    parser.add_argument("--step", type=int, metavar="K", help="of the measured steps, from 0; the last one by default")
    parser.add_argument("--titles", type=listed, metavar='"A,B"', help="one for each run, in place of what differs")
    options = parser.parse_args(arguments)
    if options.out.is_dir():
        parser.error(f"argument --out: {options.out} is a folder, it must be a file")
    try:
        drawn = panels(options.folders, options.step, options.titles)
        draw_panels(drawn, options.out)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.out}: {len(drawn)} timelines")
    return 0


def panels(
    folders: Sequence[Path], step: int | None = None, titles: Sequence[str] | None = None
) -> list[tuple[str, Trace]]:
    """(title, trace of one step) of every run; `titles` are those of the runs, in order.

    Raises `NoTrace` for all folders that have none, at once, and ValueError where `titles` are not as many as the runs.
    A sweep's points without a trace are printed on stderr if others have one.
    """
    traces = _traces_of_folders(folders, step)
    runs = list({id(run): run for run, _, _ in traces}.values())
    of_run = dict(zip(map(id, runs), titled(runs, titles), strict=True))
    return [(f"{of_run[id(run)]}, {source}", trace) for run, source, trace in traces]


def _traces_of_folders(folders: Sequence[Path], step: int | None) -> list[tuple[Run, str, Trace]]:
    """The traces of all runs, with their sources."""
    traced: list[tuple[Run, str, Trace]] = []
    missing: list[Problem] = []
    for folder in folders:
        try:
            runs = load(folder)
        except NoRun as error:
            missing += error.problems
            continue
        of_folder, without = _traces(runs, step)
        if without and of_folder:
            print("\n".join(f"left out: {line(problem)}" for problem in without), file=sys.stderr)
        else:
            missing += without
        traced += of_folder
    if missing:
        raise NoTrace(*missing)
    return traced


def _traces(runs: Sequence[Run], step: int | None) -> tuple[list[tuple[Run, str, Trace]], list[Problem]]:
    """The traces of all runs, and a problem for each run that has none."""
    traced: list[tuple[Run, str, Trace]] = []
    missing: list[Problem] = []
    for run in runs:
        try:
            traced += [(run, source, trace) for source, trace in _of_run(run, step)]
        except NoTrace as error:
            missing += error.problems
    return traced, missing


def _of_run(run: Run, step: int | None) -> Iterator[tuple[str, Trace]]:
    """("measured", its trace) and, if it exists, ("simulated", that of its prediction)."""
    record = run.record
    if record.trace is None:
        why = textwrap.shorten(f"status {record.status} {record.reason}", 160)
        raise NoTrace(Problem(str(run.folder), None, f"has no trace ({why})", hint="mode=run or mode=simulate"))
    measured = record.source == "measured"
    yield record.source, _load(run.folder / record.trace, step if measured else None)
    if measured and (run.folder / SIMULATED).exists():
        yield "simulated", _load(run.folder / SIMULATED, None)


def _load(path: Path, step: int | None) -> Trace:
    try:
        trace = Trace.load(path)
    except FileNotFoundError:
        raise NoTrace(Problem(str(path), None, "does not exist", hint="run it again")) from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise NoTrace(Problem(str(path), None, f"cannot be read: {error}", hint="run it again")) from error
    steps = sorted({span.step for span in trace.spans})
    if not steps:
        raise NoTrace(Problem(str(path), None, "has no spans: its engine leaves none"))
    if step is not None and step not in steps:
        message = f"has steps {steps[0]} to {steps[-1]}, not {step}"
        raise NoTrace(Problem(str(path), None, message, hint=f"--step {steps[-1]}"))
    return trace.only(steps[-1] if step is None else step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
