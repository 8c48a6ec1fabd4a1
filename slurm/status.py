"""`python -m slurm.status FOLDER [--only STATES [slurm.key=value ...]]`: the state of each point of a sweep.

FOLDER may also be that of a local sweep, or of a run. Of a sweep on Slurm, with `--only missing,oom` the points
in these states are submitted again, as one array with the settings of the last one and those that are given. Returns at
once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from harness.cli import compose
from harness.config import registry
from harness.core.problem import CannotRun, Problem, refuse
from harness.core.record import EXIT_CODES, Status
from harness.core.run_files import POINTS, RECORD
from harness.core.serialization import SchemaError
from harness.core.value_checks import closest
from harness.run import stored_record
from harness.sweep import closing, local
from harness.sweep.points import Point
from harness.sweep.row import Row
from slurm import array, partition, point_states, settings, submit

STATES = (
    point_states.MISSING,
    *(status for status in get_args(Status) if status not in ("running", "ok", "lost", "unknown")),
)
TITLE = "slurm.status"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code; mistakes of the user are printed, all at once, without a traceback."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        folder = Path(options.folder)
        if options.only is None and not os.path.exists(folder / POINTS):
            return show_local(folder)
        opened = _open(folder)
        with local.writing(opened.folder):
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
    states, unasked = point_states.survey(opened)
    local.show([_row(one) for one in states], opened.folder)
    if unasked:
        print(f"Slurm could not be asked: {unasked}. This is what the records say.")
    return 0


def show_local(folder: Path) -> int:
    """The table of a sweep on this machine, or of a run, as their records and locks are now."""
    rows = [_local_row(path) for path in [folder, *sorted(folder.glob("[!.]*"))] if os.path.exists(path / RECORD)]
    if not rows:
        message = f"has neither {POINTS} nor {RECORD}: it is not the folder of a sweep or of a run"
        raise CannotRun(
            [Problem(str(folder), None, message, hint="the folder that slurm.submit or run.py has printed")], TITLE
        )
    closing.close(rows, folder)
    return 0


def _local_row(folder: Path) -> Row:
    try:
        record = stored_record.load(folder)
    except (SchemaError, OSError):
        return Row(Point(folder.name, ()), waits=point_states.MISSING, waits_for=f"its {RECORD} cannot be read")
    overrides = tuple(text for text in record.manifest.get("overrides", []) if not text.startswith("out="))
    point = Point(folder.name, overrides)
    return Row(point, waits="running") if record.status == "running" else Row(point, record=record)


def again(opened: array.Array, wanted: Sequence[str], typed: Sequence[str]) -> str:
    """Submit the points in these states again; returns a message for the user."""
    chosen = settings.read(typed, opened.settings())
    _search(opened)
    states, unasked = point_states.survey(opened)
    if unasked:
        raise CannotRun([Problem("squeue", None, unasked)], TITLE)
    indices = point_states.chosen(states, wanted)
    if not indices:
        return f"no point is {' or '.join(wanted)} ({opened.folder})"
    points = opened.points()
    return submit.submit(opened, [points[index] for index in indices], chosen, partition.partitions())


def _search(opened: array.Array) -> None:
    """Take the choices of the last submission, unless the user's environment names a folder of its own."""
    jobs = opened.jobs()
    if jobs and jobs[-1].config_dir and not registry.further():
        compose.search(jobs[-1].config_dir)


def _row(one: point_states.PointState) -> Row:
    row = Row(one.point, record=one.record, waits=one.state, waits_for=one.reason)
    row.log = one.log
    return row


def _open(folder: Path) -> array.Array:
    if not os.path.exists(folder / POINTS):
        message = f"has no {POINTS}: only what python -m slurm.submit has submitted is submitted again"
        raise CannotRun([Problem(str(folder), None, message, hint="the folder that slurm.submit has printed")], TITLE)
    return array.Array(folder)


def _states(text: str) -> list[str]:
    wanted = text.split(",")
    message = f"is not one of {', '.join(STATES)}"
    unknown = {name: closest(name, list(STATES)) for name in wanted if name not in STATES}
    refuse([Problem("--only", name, message, hint=f"--only {near}") for name, near in unknown.items()], TITLE)
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m slurm.status", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--only", metavar="STATES", help=",".join(STATES))
    parser.add_argument("settings", nargs="*", default=[], metavar="slurm.key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
