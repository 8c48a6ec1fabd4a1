"""`python -m slurm.submit [--config-dir DIR] +sweeps=NAME [key=value ...] [slurm.key=value ...]`: a sweep as one array.

Takes what `python run.py -m` takes, and the keys of `slurm.settings`. Returns at once. Points that are done, wait
or run already are not submitted; one that cannot run is reported and recorded instead.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.text import Text

from harness.cli import compose, help
from harness.core.problem import CannotRun, Problem, refuse
from harness.core.record import EXIT_CODES, RunRecord
from harness.run.folder_lock import Busy
from harness.sweep import local, run_point
from harness.sweep.equal_micro_batches import equalized
from harness.sweep.points import Point, expand, refuse_mistyped
from harness.sweep.row import Row
from harness.user_model import reference
from slurm import feasibility, partition, point_states, resources, settings
from slurm.array import Array
from slurm.feasibility import Examined, examine
from slurm.limits import limits
from slurm.resources import Shape
from slurm.settings import Settings

REASON_LINES = 8


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code; mistakes of the user are printed, all at once, without a traceback."""
    options = _parser().parse_intermixed_args(arguments)
    if options.help:
        print("\n".join([str(__doc__), *help.keys(Settings, settings.PREFIX)]))
        return 0
    try:
        if options.multirun:
            message = "is run.py's, what is submitted here is a sweep anyway"
            raise CannotRun([Problem("-m", None, message, hint="leave -m out")])
        if options.config_dir:
            compose.search(options.config_dir)
        overrides, own = settings.split(reference.typed(options.overrides))
        wanted = settings.read(own)
        points = expand(overrides)
        refuse_mistyped(points)
        points = equalized(points, overrides, partial(feasibility.composed, settings=wanted))
        known = partition.partitions()
        array = Array(local.folder_of(overrides))
        with local.writing(array.folder):
            message = submit(array, points, wanted, known)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CODES["infeasible"]
    print(message)
    return 0


def submit(array: Array, points: Sequence[Point], wanted: Settings, known: Sequence[partition.Partition]) -> str:
    """Submit those of the points that have to run; returns a message for the user.

    Raises CannotRun; before all checks but sbatch's own are passed nothing is written.
    """
    array.places()
    chosen = partition.choose(wanted, known)
    refuse(partition.shortages(wanted, wanted.nodes or 1, wanted.tasks or 1, chosen), settings.TITLE)
    examined = _examined(array, points, wanted)
    places = dict(zip(points, array.indices(points), strict=True))
    able = {places[point]: one for point, one in examined.items() if not one.refused}
    asked = _request(able, wanted, chosen)
    local.make(array.folder)
    with array.changing():
        indices, active = array.add(points), point_states.active(array)
        rows = {index: Row(point) for index, point in zip(indices, points, strict=True)}
        to_run = [index for index, row in rows.items() if index not in active and _has_to_run(array, row, examined)]
        lines = [_counts(rows, len(to_run), active), *_notes(wanted, len(active))]
        if not to_run or not asked:
            return "\n".join([f"{lines[0]}: nothing to submit ({array.folder})", *lines[1:]])
        job = array.submit(to_run, wanted, asked.shape, asked.grace_s)
    shape = asked.shape
    each = f"{shape.nodes} node{'s' * (shape.nodes > 1)} x {shape.tasks} task{'s' * (shape.tasks > 1)} each"
    lines[1:1] = [f"job {job}, {each}, partition {chosen.name}"]
    return "\n".join([*lines, *asked.notes, f"python -m slurm.status {shlex.quote(str(array.folder))}"])


@dataclass(frozen=True)
class Request:
    """Resources that an array requests for the largest of its points; `notes` are for the user."""

    shape: Shape
    grace_s: float
    notes: tuple[str, ...]


def _examined(array: Array, points: Sequence[Point], wanted: Settings) -> dict[Point, Examined]:
    """The needs and refusals of the points that are not done, do not wait and do not run."""
    active = point_states.active(array)
    todo = [
        point
        for index, point in zip(array.indices(points), points, strict=True)
        if index not in active and not run_point.done_before(Row(point), array.run(point))
    ]
    return dict(zip(todo, examine(todo, wanted), strict=True))


def _request(able: dict[int, Examined], wanted: Settings, chosen: partition.Partition) -> Request | None:
    """Return the request of the points that can run, by index; None if there are none. Raises CannotRun if it is
    impossible."""
    if not able:
        return None
    shape = resources.shape([one.need for one in able.values()], wanted, chosen)
    grace_s, slurm = max(one.grace_s for one in able.values()), limits()
    problems = partition.shortages(wanted, shape.nodes, shape.tasks, chosen)
    refuse([*problems, *slurm.problems(list(able), wanted, grace_s)], settings.TITLE)
    return Request(shape, grace_s, tuple(filter(None, [slurm.note(grace_s)])))


def _has_to_run(array: Array, row: Row, examined: dict[Point, Examined]) -> bool:
    """Whether a point has to run. A point that cannot run gets its record, and is reported. One that was not examined
    because it was done or active a moment ago is left as it is."""
    one = examined.get(row.point)
    if run_point.done_before(row, array.run(row.point)) or one is None:
        return False
    if one.refused:
        _refuse(array, row, one.refused)
    return one.refused is None


def _notes(wanted: Settings, active: int) -> list[str]:
    """Return notes on the settings that hold for this array only, if `active` points of the folder wait or run
    already."""
    if not active:
        return []
    notes = ["note: points that wait or run already keep the settings that they were submitted with"]
    if wanted.parallel:
        notes.append(
            f"note: slurm.parallel={wanted.parallel} is for this array; {active} points of others wait or run, too"
        )
    return notes


def _refuse(array: Array, row: Row, record: RunRecord) -> None:
    """Record that a point cannot run, and print why."""
    try:
        run_point.refuse(row, array.run(row.point), record)
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
    return f"{len(rows)} point{'s' * (len(rows) != 1)}: {', '.join(parts)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m slurm.submit", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir", metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
