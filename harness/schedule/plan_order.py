"""The order of a plan's tasks that a file gives, or a search: `Plan.order`, the actions of each device."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.problem import Fix, Problem, ProblemError
from harness.schedule import Schedule, action_check, action_file
from harness.schedule.action_file import KEY, PASSES, Action, Actions, Cell, Overlapped, Place, parts
from harness.schedule.transfers import Transfer


def refused(
    name: str, pipeline: int | None = None, micro_batches: int | None = None, layers: int | None = None
) -> list[Problem]:
    """Return what keeps a file from any run, or from one with these numbers of devices, micro-batches and layers."""
    try:
        actions, faults = action_file.read(name), _faults(name, action_file.state_of(name))
    except action_file.Unread as error:
        return [*error.problems, *action_check.of_read_cells(error.actions, name, pipeline)]
    except ProblemError as error:
        return list(error.problems)
    found = [*action_check.other_size(actions, name, pipeline, micro_batches), *faults]
    if found or layers is None or len(actions.placement) <= layers:
        return found
    message = f"has {len(actions.placement)} stages, the model has {layers} layer{'s' * (layers != 1)}"
    return [Problem(KEY, name, message, hint="a file with fewer stages, or a larger model")]


@lru_cache(maxsize=4)
def _faults(name: str, state: action_file.State) -> tuple[Problem, ...]:
    """Return what is wrong in any run with a file that is in a `state`: asked again for each number of devices."""
    return tuple(action_check.problems(action_file.read(name), name))


def whole(problems: Sequence[Problem], samples: int, replicas: int, devices: int) -> list[Problem]:
    """Return problems of a file, whose fixes also set what they need: a cluster with more than its `devices`, a batch
    of other than its `samples`, which replicas and micro-batches divide."""
    found = []
    for one in problems:
        fixes: list[Fix] = []
        for fix in one.fixes:
            size, each = fix.get("mesh.pipeline", 0) * replicas, fix.get("batch.micro_batches", 1) * replicas
            fixes.append(fix | ({"cluster.devices": size} if size > devices else {}))
            if "batch.micro_batches" in fix and samples % each:
                fixes[-1]["batch.size"] = max(1, round(samples / each)) * each
        found.append(replace(one, fixes=tuple(fixes)))
    return found


def placement(name: str, pipeline: int) -> tuple[int, ...]:
    """Return the device of each stage of a file with a row for each of so many devices; empty for any other file."""
    if refused(name, pipeline):
        return ()
    return action_file.read(name).placement


def recomputed(actions: Actions, name: str, fix: Fix) -> list[Problem]:
    """Return a problem for an engine that recomputes nothing: the first recomputation of a file."""
    for action, place in actions.placed():
        if action.kind == "R":
            return [Problem(KEY, name, f"{place}: {action} recomputes, which this engine cannot", (fix,))]
    return []


def losses_out_of_order(actions: Actions, name: str, fix: Fix) -> list[Problem]:
    """Return a problem for an engine that finds the loss of a micro-batch by counting: the first forward pass of the
    last stage that is not in the order of micro-batches."""
    last = len(actions.placement) - 1
    forwards = [(one, place) for one, place in actions.placed() if one.stage == last and one.kind == "F"]
    for number, (action, place) in enumerate(forwards):
        if action.micro_batch != number:
            message = f"{place}: {action} comes before {last}F{number}, this engine needs the last stage's in order"
            return [Problem(KEY, name, message, (fix,))]
    return []


def waiting_pairs(actions: Actions, name: str, fix: Fix) -> list[Problem]:
    """Return a problem for an engine that begins both passes of an overlapped pair at once: a pair of which one waits
    for what the other one leads to.

    0F0,(0F1;0B0)OVERLAP_F_B,0B1     begins where 1F0 and 1B0 come first
    (0F0;0B0)OVERLAP_F_B             never begins: 0B0 waits for 1B0, which waits for 0F0
    """
    last, done = len(actions.placement) - 1, set[Op]()
    rows = [deque(enumerate(row, 1)) for row in actions.rows]
    _run(rows, done, last)
    found = []
    for number, row in enumerate(rows):
        column, cell = row[0] if row else (0, None)
        if isinstance(cell, Overlapped) and _ready(cell.actions[0], done, last):
            after, others = done | {cell.actions[0].op}, [deque(one) for one in rows if one is not row]
            _run(others, after, last)
            found.append((not _ready(cell.actions[1], after, last), Place(number + 1, column), cell))
    for _, place, cell in sorted(found, key=lambda one: one[0])[:1]:
        first, second = cell.actions
        message = f"{place}: {cell} never begins: this engine begins both passes at once, and {second} waits for what "
        return [Problem(KEY, name, f"{message}{first} leads to", (fix,), "the two passes in a cell each")]
    return []


def _run(rows: Sequence[deque[tuple[int, Cell]]], done: set[Op], last: int) -> None:
    """Take from rows all cells that can begin, with all of their passes at once, and add these to `done`."""
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and all(_ready(one, done, last) for one in parts(row[0][1])):
                done.update(one.op for one in parts(row.popleft()[1]) if one.kind in PASSES)
                moved = True


def _ready(action: Action, done: set[Op], last: int) -> bool:
    """Whether the stage before has done the pass of the same micro-batch, for a backward pass the stage after."""
    stage, kind, i = action.stage, action.kind, action.micro_batch
    if kind == "F":
        return stage == 0 or Op(stage - 1, "F", i) in done
    return kind not in ("B", "I") or stage == last or Op(stage + 1, "B", i) in done


def misplaced(plan: Plan, wanted: Sequence[int], schedule: str) -> list[Problem]:
    """Return a problem for a plan whose stages are not on the devices `wanted` (empty: one on each) of a schedule."""
    devices, wanted = [stage.device for stage in plan.stages], list(wanted or range(plan.mesh.pipeline))
    if devices == wanted:
        return []
    listed = (", ".join(map(str, numbers)) for numbers in (devices, wanted))
    message = "places its stages on devices {}, engine.schedule=" + schedule + " on {}"
    return [Problem("planner", None, message.format(*listed), ({"planner": "balance"}, {"planner": "contiguous"}))]


def read_into(plan: Plan, name: str) -> Plan:
    """Return the plan with the order of a file, without messages and waiting: runs need the file no longer.

    Raises ProblemError where a run goes on whose plan has another order: the file was changed."""
    found = with_order(plan, action_file.read(name))
    if plan.order and plan.order != found.order:
        message = "has another order than it had when the run began that goes on"
        raise ProblemError(Problem(KEY, name, message, hint="the file as it was, or out=ANOTHER_FOLDER"))
    return found


def with_order(plan: Plan, actions: Actions) -> Plan:
    """Return the plan with the order of these passes."""
    passes = actions.only_passes()
    rows = (tuple(str(cell) for cell in row if cell is not None) for row in passes.rows)
    recompute = "always" if any(action.kind == "R" for action, _ in passes.placed()) else plan.recompute
    return replace(plan, order=tuple(rows), recompute=recompute)


def recomputation(plan: Plan) -> str:
    """Return what the order of a plan recomputes: "never" anything, "always" all passes, or "some" of them."""
    kinds = Counter(action.kind for action, _ in actions(plan).placed())
    return "never" if not kinds["R"] else "always" if kinds["R"] == kinds["F"] else "some"


def actions(plan: Plan) -> Actions:
    """Return the order of a plan as actions."""
    return _parsed(plan.order)


@lru_cache(maxsize=4)
def _parsed(order: tuple[tuple[str, ...], ...]) -> Actions:
    """Return an order as actions: a plan is asked for its schedule several times."""
    return Actions(tuple(tuple(map(action_file.cell_of, row)) for row in order))


def schedule(plan: Plan, transfers: Sequence[Transfer]) -> Schedule:
    """Return the schedule of a plan's order."""
    return action_file.to_schedule(actions(plan), transfers)
