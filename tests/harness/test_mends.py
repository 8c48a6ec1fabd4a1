"""Which of several mends counts."""

from __future__ import annotations

import pytest

from harness import mends
from harness.problem import Problem


def problem(what: str, mend: str) -> Problem:
    return Problem("mesh.pipeline 16", what, mend)


@pytest.mark.parametrize("numbers", [(8, 5), (5, 8)])
def test_of_two_mends_of_a_key_the_smaller_is_told(numbers: tuple[int, int]) -> None:
    large, small = (problem(f"only {number}", f"mesh.pipeline={number}") for number in numbers)
    other = problem("is odd", "leave it out")
    kept = min(large, small, key=lambda one: one.mend)
    assert mends.told_once([large, small, other, other]) == [kept, other]


def test_another_way_that_mends_only_one_of_two_is_left_out() -> None:
    devices = problem("needs 16 devices", "mesh.pipeline=2, or cluster.devices=16")
    layers = problem("needs 16 layers", "mesh.pipeline=5")
    told = problem("needs 16 devices", "mesh.pipeline=2")
    assert mends.told_once([devices, layers]) == mends.told_once([layers, devices]) == [told]
    assert mends.told_once([devices, devices]) == [devices]


@pytest.mark.parametrize(
    ("mend", "value"),
    [("mesh.data=2", 2), ("mesh.data=2, or cluster.devices=7", 2), ("mesh.pipeline=1 mesh.data=3", 3),
     ("mesh.data=9", 7), ("cluster.devices=3", 7), ("4 or 2", 7), ("", 7)],
)  # fmt: skip
def test_what_a_key_will_be_by_the_first_way(mend: str, value: int) -> None:
    assert mends.mended([problem("x", mend)], "mesh.data", 7) == value


def test_as_the_user_would_type_it() -> None:
    assert mends.typed({"engine.offload": True, "batch.size": 4, "planner.by": "memory"}) == (
        "engine.offload=true batch.size=4 planner.by=memory"
    )
