"""Keys as keyword arguments are the overrides that would be typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cli import keywords
from harness.cli.compose import compose
from harness.core.problem import CannotRun
from harness.sweep.points import expand


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"engine": "gpipe"}, ["engine=gpipe"]),
        ({"engine": ["gpipe", "ddp"], "steps": 5}, ["engine=gpipe,ddp", "steps=5"]),
        ({"mesh": {"pipeline": 2, "data": None}}, ["mesh.pipeline=2", "mesh.data=null"]),
        ({"mesh": {"pipeline": [1, 2]}}, ["mesh.pipeline=1,2"]),
        ({"planner": {"balance": (3, 5)}}, ["planner.balance=[3,5]"]),
        ({"planner": {"balance": [(3, 5), (4, 4)]}}, ["planner.balance=[3,5],[4,4]"]),
        (
            {"remeasure": True, "optimizer.lr": 0.25, "jitter": 1e-9},
            ["remeasure=true", "optimizer.lr=0.25", "jitter=1e-09"],
        ),
        ({"out": Path("it's, mine"), "profile": "null"}, ["out='it\\'s, mine'", "profile='null'"]),
        ({}, []),
    ],
)
def test_they_are_what_is_typed(keys: dict[str, Any], expected: list[str]) -> None:
    assert keywords.overrides(keys) == expected


def test_values_arrive_as_they_were_given() -> None:
    keys = {"engine": ["single", "ddp"], "optimizer": {"lr": 1e-05}, "out": "a, 'b' and = c", "seed": [1, 2]}
    points = expand(keywords.overrides({key: value for key, value in keys.items() if key != "out"}))
    assert [compose(point.overrides).engine.name for point in points] == ["single", "single", "ddp", "ddp"]
    assert [compose(point.overrides).seed for point in points] == [1, 2, 1, 2]
    config = compose(keywords.overrides({"out": keys["out"], "optimizer": keys["optimizer"], "launch.timeout_s": None}))
    assert (config.out, config.optimizer.lr, config.launch.timeout_s) == (keys["out"], 1e-05, None)


def test_all_values_that_no_key_takes_are_refused_at_once() -> None:
    with pytest.raises(CannotRun) as raised:
        keywords.overrides({"engine": [], "mesh": {"pipeline": object}, "steps": 5, "seed": [1, {"a": 2}]})
    assert [problem.key for problem in raised.value.problems] == ["engine", "mesh.pipeline", "seed"]
    assert "is an empty list" in str(raised.value) and "{'a': 2} (dict)" in str(raised.value)
