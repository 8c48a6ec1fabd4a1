"""`python -m slurm.status FOLDER [--only STATES [slurm.key=value ...]]`: how the points of a sweep stand, by state.

With `--only missing,oom` the points in these states are submitted again, as one array with the settings of the last
one and those that are given. Returns at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from harness import compose, sweep
from harness.config_check import closest
from harness.problem import CannotRun, Problem
from harness.record import EXIT_CODES, Status
from harness.sweep_table import Row
from slurm import array, partition, settings, states, submit

STATES = (states.MISSING, *(status for status in get_args(Status) if status not in ("running", "ok")))
TITLE = "this status"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code; mistakes of the user are printed, all at once, without a traceback."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        opened = _open(Path(options.folder))
        with sweep.writing(opened.folder):
            if options.only is None:
                return show(opened)
            print(again(opened, _states(options.only), options.settings))
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CODES["infeasible"]
    return 0


def show(opened: array.Array) -> int:
    """The table of a sweep, kept as points.csv, too, why points failed and where their logs are, and how many are in
    each state."""
    found, unasked = states.survey(opened)
    sweep.show([_row(one) for one in found], opened.folder)
    if unasked:
        print(f"Slurm could not be asked: {unasked}. This is what the records say.")
    return 0


def again(opened: array.Array, wanted: Sequence[str], typed: Sequence[str]) -> str:
    """Submit the points in these states again; returns what to tell the user."""
    chosen = settings.read(typed, opened.settings())
    _search(opened)
    found, unasked = states.survey(opened)
    if unasked:
        raise CannotRun([Problem("squeue", unasked)], TITLE)
    indices = states.chosen(found, wanted)
    if not indices:
        return f"no point is {' or '.join(wanted)} ({opened.folder})"
    points = opened.points()
    return submit.submit(opened, [points[index] for index in indices], chosen, partition.partitions())


def _search(opened: array.Array) -> None:
    """Take the choices of the last submission, unless the user's environment names a folder of its own."""
    jobs = opened.jobs()
    if jobs and jobs[-1].config_dir and not compose.further():
        compose.search(jobs[-1].config_dir)


def _row(one: states.PointState) -> Row:
    row = Row(one.point, record=one.record, waits=f"{one.state} ({one.reason})" if one.reason else one.state)
    row.log = one.log
    return row


def _open(folder: Path) -> array.Array:
    if not (folder / array.POINTS).exists():
        what = f"has no {array.POINTS}: it is no folder of python -m slurm.submit"
        raise CannotRun([Problem(str(folder), what, "the folder that slurm.submit has told")], TITLE)
    return array.Array(folder)


def _states(text: str) -> list[str]:
    wanted = text.split(",")
    problems = [
        Problem(f"--only {name}", f"is not one of {', '.join(STATES)}", f"--only {closest(name, list(STATES))}")
        for name in wanted
        if name not in STATES
    ]
    if problems:
        raise CannotRun(problems, TITLE)
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m slurm.status", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--only", metavar="STATES", help=",".join(STATES))
    parser.add_argument("settings", nargs="*", metavar="slurm.key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
