"""Schedules from and to files on the command line: python -m harness.schedule FILE out=PATH.

python -m harness.schedule own.csv                              the picture as text, the bubble, what devices keep
python -m harness.schedule zbv stages=8 out=zbv.csv out=zbv.png  a schedule as a file, and as a picture
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import COMPUTE
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import Problem, ProblemError
from harness.core.trace import Trace
from harness.core.units import percent
from harness.schedule import Schedule, action_check, action_file
from harness.schedule.action_file import Actions
from harness.schedule.transfers import transfers
from harness.simulator import simulate

SLOT_S = 1e-3
"""A forward pass in pictures; a backward pass takes two of these, each of its halves one."""


def unit_time(schedule: Schedule) -> Trace:
    """Simulate a step in which a forward pass takes a slot, a backward pass two, and messages none.

    Raises `Deadlock` where the schedule cannot end.
    """
    plan = Plan(Mesh(), tuple(Stage(j, j, device) for j, device in enumerate(schedule.devices)))
    profile = ModelProfile((LayerProfile(forward_s=SLOT_S, backward_s=2 * SLOT_S),) * len(schedule.devices))
    cluster = Cluster(devices_per_node=max(schedule.devices) + 1)
    return simulate(schedule, plan, profile, cluster, MemoryModel()).trace


def read(name: str) -> Schedule:
    """Return the schedule of a file. Raises ProblemError with all that is wrong with it."""
    try:
        actions = action_file.read(name)
    except action_file.Unread as error:
        raise ProblemError(*error.problems, *action_check.of_read_cells(error.actions, name)) from None
    if found := action_check.problems(actions, name):
        raise ProblemError(*found)
    boundaries = [0] * (len(actions.placement) - 1)
    return action_file.to_schedule(actions, transfers(boundaries, (), portals=True))


def remarks(name: str) -> list[str]:
    """Return what else there is to say about a file: whether it ends where messages block."""
    found = action_check.problems(action_file.read(name), name, blocking=True)
    return [f"note: {one.message}" for one in found]


def facts(schedule: Schedule) -> str:
    """Return the numbers of a schedule in unit time.

    4 devices, 4 stages, 8 micro-batches: 33 slots, bubble 27 %; activations kept at most: 4, 3, 2, 1
    """
    trace = unit_time(schedule)
    busy: dict[int, float] = defaultdict(float)
    for span in trace.spans:
        if span.parsed.kind in COMPUTE:
            busy[span.device] += span.end_s - span.start_s
    length_s = max(span.end_s for span in trace.spans)
    devices = sorted(busy)
    bubble = 1 - sum(busy.values()) / (len(devices) * length_s)
    kept = kept_activations(trace)
    counts = (
        _count(len(devices), "device"),
        _count(len(schedule.devices), "stage"),
        _count(len({op.micro_batch for op in schedule.ops() if op.kind == "F"}), "micro-batch", "es"),
    )
    most = ", ".join(str(kept[device]) for device in devices)
    slots = round(length_s / SLOT_S)
    return f"{', '.join(counts)}: {slots} slots, bubble {percent(bubble)}; activations kept at most: {most}"


def kept_activations(trace: Trace) -> dict[int, int]:
    """Return for how many micro-batches of its stages a device keeps activations at most: from the beginning of a
    forward pass, or of its recomputation, to the end of the backward pass, both halves of it."""
    begins: dict[tuple[int, int, int | None], float] = {}
    ends: dict[tuple[int, int, int | None], float] = {}
    for span in trace.spans:
        op = span.parsed
        place = (span.device, op.stage, op.micro_batch)
        if op.kind in ("F", "R"):
            begins[place] = max(begins.get(place, 0.0), span.start_s)
        elif op.kind in ("B", "W"):
            ends[place] = max(ends.get(place, 0.0), span.end_s)
    most: dict[int, int] = {}
    for device in {device for device, _, _ in begins}:
        own = [place for place in begins if place[0] == device]
        changes = sorted([*((begins[one], 1) for one in own), *((ends[one], -1) for one in own)])
        held = highest = 0
        for _, change in changes:
            held += change
            highest = max(highest, held)
        most[device] = highest
    return most


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _write_actions(schedule: Schedule, path: Path) -> None:
    action_file.write(action_file.from_schedule(_as_run(schedule)), path)


def _as_run(schedule: Schedule) -> Schedule:
    """Return the schedule with the tasks of each device in the order in which they run where a rule picks: a file has
    no rules."""
    ran = unit_time(schedule).queues()
    queues = tuple(
        replace(queue, ops=tuple(span.parsed for span in ran[queue.device, queue.name]), rule="in_order")
        if queue.name == "compute" and queue.rule != "in_order"
        else queue
        for queue in schedule.queues
    )
    return replace(schedule, queues=queues)


def _write_picture(schedule: Schedule, path: Path) -> None:
    from harness.report import timeline_plot

    timeline_plot.draw(unit_time(schedule), path, "in unit time: a forward pass takes 1 ms")


def _write_trace(schedule: Schedule, path: Path) -> None:
    unit_time(schedule).save(path)


WRITERS: dict[str, Callable[[Schedule, Path], None]] = {
    ".csv": _write_actions,
    ".trace.json.gz": _write_trace,
    ".json": _write_actions,
    ".png": _write_picture,
}
"""By the end of a file's name. A trace is for ui.perfetto.dev."""


def writer(path: str) -> Callable[[Schedule, Path], None]:
    """Return what writes such a file. Raises ProblemError for a name that ends in another way."""
    for suffix, write in WRITERS.items():
        if path.endswith(suffix):
            return write
    raise ProblemError(Problem("out", path, f"ends in none of {', '.join(WRITERS)}", hint="out=own.csv"))


def save(schedule: Schedule, path: str, actions: Actions | None = None) -> None:
    """Write a schedule as actions, picture or trace. `actions` are those of the file that it was read from, which has
    more than a schedule: overlapped pairs, messages, waiting. Raises ProblemError where it cannot be written, or has
    ops that no action is (`out=*.csv`)."""
    write = writer(path)
    if write is _write_actions and (found := [op for op in schedule.ops() if op.kind == "collective"]):
        message = f"has no action for {found[0]}"
        raise ProblemError(Problem("out", path, message, hint="out=own.png"))
    try:
        if write is _write_actions and actions:
            action_file.write(actions, path)
        else:
            write(schedule, Path(path))
    except OSError as error:
        raise ProblemError(Problem("out", path, f"cannot be written: {error.strerror}", hint="another path")) from None
