"""`python -m slurm.submit [--config-dir DIR] +sweeps=NAME [key=value ...] [slurm.key=value ...]`: a sweep as one array.

Takes what `python run.py -m` takes, and the keys of `slurm.settings`. Returns at once. Points that are done, wait
or run already are not submitted; one that cannot run is told and recorded instead.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from harness import compose, help, sweep, sweep_run
from harness.problem import CannotRun
from harness.record import EXIT_CODES, RunRecord
from harness.sweep_lock import Busy
from harness.sweep_points import expand, refuse_mistyped
from harness.sweep_table import Row
from slurm import need, partition, settings, states
from slurm.array import Array
from slurm.examined import Examined, examine
from slurm.limits import limits
from slurm.settings import Settings

REASON_LINES = 8


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code; mistakes of the user are printed, all at once, without a traceback."""
    options = _parser().parse_intermixed_args(arguments)
    if options.help:
        print("\n".join([str(__doc__), *help.keys(Settings, settings.PREFIX)]))
        return 0
    try:
        if options.config_dir:
            compose.search(options.config_dir)
        overrides, own = settings.split(options.overrides)
        wanted = settings.read(own)
        points = expand(overrides)
        refuse_mistyped(points)
        known = partition.partitions()
        folder = sweep.folder_of(overrides)
        array = Array(folder)
        with sweep.writing(folder), array.changing():
            told = submit(array, array.add(points), wanted, known)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CODES["infeasible"]
    print(told)
    return 0


def submit(array: Array, indices: Sequence[int], wanted: Settings, known: Sequence[partition.Partition]) -> str:
    """Submit those of the points that have to run; returns what to tell the user. Raises CannotRun."""
    chosen = partition.choose(wanted, known)
    points, active = array.points(), states.active(array)
    rows = {index: Row(points[index]) for index in indices}
    found = _to_run(array, {index: row for index, row in rows.items() if index not in active}, wanted)
    told = _counts(rows, len(found), active)
    if not found:
        return f"{told}: nothing to submit ({array.folder})"
    shape = need.shape([one.need for one in found.values()], wanted, chosen)
    grace_s, slurm = max(one.grace_s for one in found.values()), limits()
    problems = partition.shortages(wanted, shape.nodes, shape.tasks, chosen)
    if problems := [*problems, *slurm.problems(list(found), wanted, grace_s)]:
        raise CannotRun(problems, settings.TITLE)
    job = array.submit(list(found), wanted, shape, grace_s)
    each = f"{shape.nodes} node{'s' * (shape.nodes > 1)} x {shape.tasks} task{'s' * (shape.tasks > 1)} each"
    lines = [told, f"job {job}, {each}, partition {chosen.name}", slurm.note(grace_s)]
    return "\n".join([*filter(None, lines), f"python -m slurm.status {shlex.quote(str(array.folder))}"])


def _to_run(array: Array, rows: dict[int, Row], wanted: Settings) -> dict[int, Examined]:
    """The points that have to run, by index. Those that cannot get their record, and are told."""
    todo = [index for index, row in rows.items() if not sweep_run.done_before(row, array.run(row.point))]
    found = dict(zip(todo, examine([rows[index].point for index in todo], wanted), strict=True))
    for index, one in found.items():
        if one.refused:
            _refuse(array, rows[index], one.refused)
    return {index: one for index, one in found.items() if rows[index].record is None}


def _refuse(array: Array, row: Row, record: RunRecord) -> None:
    """Record that a point cannot run, and tell why."""
    try:
        sweep_run.refuse(row, array.run(row.point), record)
    except Busy:
        row.record = record
    lines = record.reason.strip().splitlines()[:REASON_LINES]
    text = "\n  ".join([f"{row.point.id} {record.status}", *lines])
    Console(file=sys.stdout).print(Text(text), soft_wrap=True)


def _counts(rows: dict[int, Row], submitted: int, active: dict[int, str]) -> str:
    """24 points: 20 submitted, 1 infeasible, 2 done before, 1 waits or runs already"""
    parts = [f"{submitted} submitted"]
    for what, number in (
        ("infeasible", sum(row.record is not None and not row.before for row in rows.values())),
        ("done before", sum(row.before for row in rows.values())),
        ("waiting or running already", sum(index in active for index in rows)),
    ):
        parts += [f"{number} {what}"] if number else []
    return f"{len(rows)} points: {', '.join(parts)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m slurm.submit", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config-dir", metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
