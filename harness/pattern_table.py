"""A plan's pattern on the terminal: its period beside what no plan can beat, what each device stores, two periods."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.display import percent, seconds, size
from harness.pattern import Pattern
from harness.pattern_grid import grid
from harness.plan import Plan

WIDTH = 110
ROUNDING = 1e-9
BOUND = "lower bound"
OTHERS = {
    "least_s": (BOUND, "of whole stages, one device having several"),
    "least_of_any_s": (BOUND, "of any schedule"),
    "contiguous_s": ("", "the best consecutive stages"),
}
"""Periods that a planner may tell beside its plan's."""
OF_PERIOD = "between one micro-batch and the next; a step has filling and draining, too"
OF_MEMORY = "memory: while the pattern is repeated, as the planner counts; peak memory, above: in the simulated step"


def pattern_table(plan: Plan, pattern: Pattern) -> Group:
    """Three parts below each other."""
    devices = (_devices(plan), Text(OF_MEMORY))
    return Group(_periods(plan), Text(), *devices, Text(), Text(_grid(plan, pattern), no_wrap=True))


def least_s(plan: Plan) -> float | None:
    """Of the periods that no plan can beat the longest one that holds for this plan; None if its planner tells none."""
    bounds = [plan.predicted.get(key) for key, (title, _) in OTHERS.items() if title]
    return max((bound_s for bound_s in bounds if bound_s is not None and _holds(plan, bound_s)), default=None)


def _holds(plan: Plan, bound_s: float) -> bool:
    """Whether a bound is one of plans of this kind: else the plan may be below it."""
    return bool(bound_s <= plan.predicted["period_s"] * (1 + ROUNDING))


def _periods(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in _lines(plan):
        table.add_row(*map(Text, row))
    return table


def _lines(plan: Plan) -> Iterator[tuple[str, str, str]]:
    period_s = plan.predicted["period_s"]
    short = "" if plan.predicted.get("finished", True) else "the best when time was up; "
    yield "period", seconds(period_s), short + OF_PERIOD
    if "one_device_s" in plan.predicted:
        yield (
            "speed-up",
            f"{plan.predicted['one_device_s'] / period_s:.2f}",
            "over one device with memory enough, without filling",
        )
    for key, (title, told) in OTHERS.items():
        other_s = plan.predicted.get(key)
        if other_s is None:
            continue
        if title and not _holds(plan, other_s):
            yield "", seconds(other_s), f"{told}: this plan is of another kind"
        else:
            yield title, seconds(other_s), told + (f": gap {percent(period_s / other_s - 1)}" if title else "")


def _devices(plan: Plan) -> Table:
    """A row for each device: its stages, how many micro-batches each stores, bytes at the fullest moment."""
    table = Table(box=None, pad_edge=False)
    for title in ("device", "stages", "stored micro-batches", "memory", "limit"):
        table.add_column(title, justify="right")
    for device in plan.devices:
        own = [number for number, stage in enumerate(plan.stages) if stage.device == device]
        stored = [plan.predicted["activations"][number] for number in own]
        held, limit = plan.predicted["pattern_memory_bytes"][device], plan.predicted["memory_limit_bytes"]
        texts = (device, ", ".join(map(str, own)), ", ".join(map(str, stored)), size(held), size(limit))
        table.add_row(*(Text(str(text)) for text in texts))
    return table


def _grid(plan: Plan, pattern: Pattern) -> str:
    return grid(pattern, plan.predicted["tasks_s"], WIDTH)
