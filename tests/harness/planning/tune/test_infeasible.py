"""The refusal of a search of which nothing is possible."""

from __future__ import annotations

from typing import Any

from harness.core.plan import Mesh
from harness.core.problem import Fix, NoPlan, Problem
from harness.planning.draft import Layout
from harness.planning.tune import infeasible
from harness.planning.tune.candidates import Candidate
from harness.planning.tune.judge import Judge
from harness.planning.tune.result import Line
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
