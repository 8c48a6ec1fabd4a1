"""The order of a plan's tasks that a file gives, or a search: `Plan.order`, the actions of each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.core.plan import Plan
from harness.core.problem import Fix, Problem, ProblemError
from harness.schedule import Schedule, action_check, action_file
from harness.schedule.action_file import KEY, Actions
from harness.schedule.transfers import Transfer


def refused(
    name: str, pipeline: int | None = None, micro_batches: int | None = None, layers: int | None = None
) -> list[Problem]:
    """Return what keeps a file from any run, or from one with these numbers of devices, micro-batches and layers."""
    try:
        actions = action_file.read(name)
    except ProblemError as error:
        return list(error.problems)
    found = action_check.problems(actions, name, pipeline, micro_batches)
    if found or layers is None or len(actions.placement) <= layers:
        return found
    message = f"has {len(actions.placement)} stages, the model has {layers} layer{'s' * (layers != 1)}"
    return [Problem(KEY, name, message, hint="a file with fewer stages, or a larger model")]


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


def misplaced(plan: Plan, wanted: Sequence[int], schedule: str) -> list[Problem]:
    """Return a problem for a plan whose stages are not on the devices `wanted` (empty: one on each) of a schedule."""
    devices, wanted = [stage.device for stage in plan.stages], list(wanted or range(plan.mesh.pipeline))
    if devices == wanted:
        return []
    listed = (", ".join(map(str, numbers)) for numbers in (devices, wanted))
    message = "places its stages on devices {}, engine.schedule=" + schedule + " on {}"
    return [Problem("planner", None, message.format(*listed), ({"planner": "balance"}, {"planner": "contiguous"}))]


def read_into(plan: Plan, name: str) -> Plan:
    """Return the plan with the order of a file, without messages and waiting: runs need the file no longer."""
    return with_order(plan, action_file.read(name))


def with_order(plan: Plan, actions: Actions) -> Plan:
    """Return the plan with the order of these passes."""
    passes = actions.only_passes()
    rows = (tuple(str(cell) for cell in row if cell is not None) for row in passes.rows)
    recompute = "always" if any(action.kind == "R" for action, _ in passes.placed()) else plan.recompute
    return replace(plan, order=tuple(rows), recompute=recompute)


def actions(plan: Plan) -> Actions:
    """Return the order of a plan as actions."""
    return Actions(tuple(tuple(map(action_file.cell_of, row)) for row in plan.order))


def schedule(plan: Plan, transfers: Sequence[Transfer]) -> Schedule:
    """Return the schedule of a plan's order."""
    return action_file.to_schedule(actions(plan), transfers)
