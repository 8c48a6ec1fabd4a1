"""The refusal of a search of which nothing is possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cli.compose import compose
from harness.core import units
from harness.core.plan import Mesh
from harness.core.problem import CannotRun, Fix, NoPlan, Problem
from harness.planning.draft import Layout
from harness.planning.tune import infeasible
from harness.planning.tune.candidates import Candidate
from harness.planning.tune.judge import Judge
from harness.planning.tune.result import Line
from harness.report.progress import Progress
from tests.harness.planning.tune.nets import FLAT, Nets
from tests.problems import rows


def test_a_planner_is_asked_for_the_fixes_of_the_closest_candidate_alone() -> None:
    asked = []

    class Without(Judge):
        overrides = ()

        def __init__(self) -> None: ...

        def layout(self, one: Candidate, compares: bool = False) -> Layout:
            shards = one.mesh.tensor

            def find() -> list[Fix]:
                asked.append(shards)
                return [{"mesh.tensor": shards // 2}]

            raise NoPlan(Problem("mesh.tensor", shards, "cannot split it"), find)

    def without_plan(shards: int) -> Line:
        problem = Problem("mesh.tensor", shards, "cannot split it")
        return Line(Candidate(1, Mesh(tensor=shards), 8), (problem,), no_plan=True)

    tuner: Any = Without()
    assert rows(infeasible.impossible(tuner, [without_plan(4), without_plan(2)])) == [
        ("mesh.tensor", 2, ["mesh.tensor=1"]),
    ]
    assert asked == [2]


def test_the_closest_candidate_is_the_one_that_a_simulation_finds_and_its_parts_are_what_it_needs(
    tmp_path: Path,
) -> None:
    """gpipe keeps the outputs of all micro-batches, which its estimate does not know."""
    overrides = ["mode=tune", *FLAT, "engine=gpipe", "batch.size=64", "cluster.memory_gb=0.03"]
    tuner = Nets(compose(overrides), overrides, tmp_path, Progress())
    with pytest.raises(CannotRun) as caught:
        tuner.search()
    (found,) = caught.value.problems
    full = [line for line in tuner.lines.values() if line.candidate in tuner.planned]
    simulated = [sum(tuner.held(line).values()) for line in full]
    assert found.numbers["needed_bytes"] == min(simulated)
    assert f", {units.size(min(simulated))} are needed" in found.message
