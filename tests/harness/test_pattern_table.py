"""What the terminal shows of a plan's pattern."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from harness.mesh import Mesh
from harness.pattern_table import least_s, pattern_table
from harness.plan import Plan, Stage
from tests.harness.patterns import TWO

TOLD = {
    "period_s": 3.0, "least_s": 2.5, "least_of_any_s": 2.0, "contiguous_s": 3.5, "one_device_s": 6.0,
    "activations": [2, 1],
    "pattern_memory_bytes": [2**30, 2**29], "memory_limit_bytes": 2**31, "finished": True,
    "tasks_s": {"0F0": 1.0, "1F0": 1.0, "1B0": 2.0, "0B0": 2.0},
}  # fmt: skip
PLAN = Plan(Mesh(pipeline=2), (Stage(0, 1, 0), Stage(2, 3, 1)), 4, pattern=TWO, predicted=TOLD)


def shown(plan: Plan) -> str:
    assert plan.pattern is not None
    out = io.StringIO()
    Console(file=out, width=140).print(pattern_table(plan, plan.pattern))
    return out.getvalue()


def test_period_bounds_and_gaps() -> None:
    lines = [" ".join(line.split()) for line in shown(PLAN).splitlines()]
    assert lines[:5] == [
        "period 3.00 s between one micro-batch and the next; a step has filling and draining, too",
        "speed-up 2.00 over one device with memory enough, without filling",
        "lower bound 2.50 s of whole stages, one device having several: gap 20 %",
        "lower bound 2.00 s of any schedule: gap 50 %",
        "3.50 s the best consecutive stages",
    ]
    assert "0 0 2 1.0 GiB 2.0 GiB" in lines and "1 1 1 512.0 MiB 2.0 GiB" in lines
    assert any(line.startswith("device 0 |0F0") for line in lines)


def test_two_numbers_of_one_device_are_told_apart() -> None:
    """The table of stages, above, has the simulated step's."""
    text = shown(PLAN)
    assert "device  stages  stored micro-batches     memory    limit" in text
    assert "memory: while the pattern is repeated, as the planner counts; peak memory, above: in the simu" in text


@pytest.mark.parametrize(
    ("bounds", "least"),
    [({}, 2.5), ({"least_s": 3.2}, 2.0), ({"least_s": None}, 2.0), ({"least_s": None, "least_of_any_s": None}, None)],
)
def test_the_bound_of_a_plan_is_the_longest_one_of_its_kind(bounds: dict[str, float | None], least: float) -> None:
    assert least_s(replace(PLAN, predicted=TOLD | bounds)) == least


def test_a_bound_of_another_kind_of_plan_is_no_bound() -> None:
    text = shown(replace(PLAN, predicted=TOLD | {"least_s": 3.2}))
    assert "this plan is of another kind" in text and text.count("lower bound") == 1


def test_time_that_was_up_is_told() -> None:
    assert "the best when time was up" in shown(replace(PLAN, predicted=TOLD | {"finished": False}))


def test_planners_that_prove_nothing_show_no_bounds() -> None:
    few = {key: value for key, value in TOLD.items() if "least" not in key and key != "contiguous_s"}
    assert "bound" not in shown(replace(PLAN, predicted=few))
