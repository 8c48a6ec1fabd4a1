"""Why candidates are impossible: each reason once, with the fixes that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.plan import Mesh
from harness.core.problem import Fix, Problem
from harness.planning.tune.candidates import Candidate
from harness.planning.tune.impossible import SHOWN, reasons
from harness.planning.tune.result import Line, Reason
from tests.harness.planning.tune.nets import tuned


def out(problem: Problem, shards: int = 1) -> Line:
    return Line(Candidate(1, Mesh(tensor=shards), 8), (problem,))


def unsplit(shards: int) -> Line:
    message = f"needs a plan for {shards} devices"
    return out(Problem("engine", "sbp", message, ({"planner": "a"}, {"planner": "b"}, {"mesh.tensor": shards})), shards)


def test_problems_that_differ_in_numbers_are_one_reason() -> None:
    lines = [unsplit(8), out(Problem("batch.size", 6, "is odd")), Line(Candidate(1, Mesh(), 8)), unsplit(2), unsplit(4)]
    lines.append(out(Problem("cluster.memory_gb", None, "needs 3 GiB")))
    asked: list[tuple[int, Fix]] = []

    def helps(line: Line, fix: Fix) -> bool:
        asked.append((line.candidate.mesh.tensor, fix))
        return fix == {"planner": "b"}

    found = reasons(lines, helps)
    assert found == (
        Reason(3, "engine sbp   needs a plan for 2, 4 and 8 devices   -> planner=b"),
        Reason(1, "batch.size 6   is odd"),
    ), "what has no memory is counted elsewhere"
    assert str(found[0]).startswith("3 impossible: engine sbp   needs")
    wanted = [(8, {"planner": "a"}), (4, {"planner": "a"}), (8, {"planner": "b"})]
    assert asked == wanted, "the first and the last one; not the fix that one candidate has alone"


def test_values_that_differ_are_listed_and_the_rarest_reasons_are_left_out() -> None:
    lines = [out(Problem("mesh.tensor", shards, "does not divide 9")) for shards in (2, 4)]
    others = [out(Problem("engine", "x", f"is {word}")) for word in ("slow", "old", "new")]
    found = reasons([*others, *lines], lambda line, fix: True)
    assert len(found) == SHOWN
    assert found[0] == Reason(2, "mesh.tensor 2 and 4   does not divide 9")


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("given", [False, True])
def test_a_fix_is_shown_where_it_makes_candidates_possible(given: bool, tmp_path: Path) -> None:
    """A schedule that needs more micro-batches than there are; where it is searched, so is the fix."""
    typed = ["engine=torch_pipelining", "batch.size=8", *["engine.schedule=1f1b"] * given]
    found = tuned(tmp_path, *typed)
    reason = next(one for one in found.impossible if "which engine.schedule=1f1b needs" in one.reason)
    assert reason.reason.endswith("-> engine.schedule=gpipe")
    assert vars(reason) in found.metrics()["tuned"]["impossible"]
