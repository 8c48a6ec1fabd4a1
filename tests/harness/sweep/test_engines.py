"""engine=all, and mode=tune over several engines."""

from __future__ import annotations

import pytest

from harness.sweep import engines
from harness.sweep.points import expand


def test_an_engine_that_stands_in_for_another_one_is_not_compared() -> None:
    assert {*engines.known()} - {*engines.compared()} == {"delayed"}
    assert [point.values() for point in expand(["engine=delayed,single"])] == [
        {"engine": "delayed"},
        {"engine": "single"},
    ]


def test_all_stands_for_each_engine() -> None:
    found = [point.values() for point in expand(["engine=all", "batch.size=8,16"])]
    assert len(found) == 2 * len(engines.compared()) and found[0] == {"batch.size": "8", "engine": "single"}
    assert {"engine": "sbp", "planner": "autoddl", "batch.size": "16"} in found, (
        "it runs no plan of the default planner"
    )


def test_a_planner_that_is_given_stays() -> None:
    found = [point.values() for point in expand(["engine=all", "planner=megatron"])]
    assert {values["planner"] for values in found} == {"megatron"}


def test_tuning_a_list_searches_planners_itself() -> None:
    found = [point.values() for point in expand(["mode=tune", "engine=sbp,ddp"])]
    assert found == [{"mode": "tune", "engine": "sbp"}, {"mode": "tune", "engine": "ddp"}]


@pytest.mark.parametrize(
    ("overrides", "several"),
    [
        (["mode=tune", "engine=ddp,fsdp"], True),
        (["mode=tune", "engine=[ddp,fsdp]"], True),
        (["mode=tune", "engine=all"], True),
        (["mode=tune", "engine=ddp"], False),
        (["mode=tune"], False),
        (["mode=plan", "engine=ddp,fsdp"], False),
    ],
)
def test_tuning_several_engines_is_a_sweep(overrides: list[str], several: bool) -> None:
    assert engines.tunes_several(overrides) == several
