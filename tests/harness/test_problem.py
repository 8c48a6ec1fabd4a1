from __future__ import annotations

from harness.problem import CannotRun, NoPlan, Problem, table

PROBLEMS = [
    Problem("mesh.pipeline 16", "needs 16 devices, the cluster has 8", "mesh.pipeline=8"),
    Problem("batch.micro_batches 7", "does not divide batch.size 512", "8 or 4"),
    Problem("stage 3", "needs 27.1 GiB of 22.0"),
]
EXPECTED = """\
engine=gpipe model=unet cannot run:
  mesh.pipeline 16        needs 16 devices, the cluster has 8   -> mesh.pipeline=8
  batch.micro_batches 7   does not divide batch.size 512        -> 8 or 4
  stage 3                 needs 27.1 GiB of 22.0"""


def test_all_problems_are_in_one_aligned_table() -> None:
    assert table(PROBLEMS, "engine=gpipe model=unet") == EXPECTED


def test_cannot_run_says_the_table_and_keeps_the_problems() -> None:
    error = CannotRun(PROBLEMS, "engine=gpipe model=unet")
    assert str(error) == EXPECTED
    assert error.problems == tuple(PROBLEMS)


def test_no_plan_names_what_binds() -> None:
    error = NoPlan("mesh.pipeline 16", "needs at least 16 layers, the model has 5", "mesh.pipeline=5")
    assert error.problem == Problem("mesh.pipeline 16", "needs at least 16 layers, the model has 5", "mesh.pipeline=5")
    assert str(error) == "mesh.pipeline 16: needs at least 16 layers, the model has 5 -> mesh.pipeline=5"
    assert str(NoPlan("planner.by x", "is unknown")) == "planner.by x: is unknown"


def test_a_mend_that_takes_long_is_looked_for_when_it_is_asked_for() -> None:
    asked: list[str] = []

    def mend() -> str:
        asked.append("mend")
        return "fewer stages"

    error = NoPlan("mesh.pipeline 16", "is more than the 8 layers", mend)
    assert (error.key, error.what, asked) == ("mesh.pipeline 16", "is more than the 8 layers", [])
    assert str(error) == "mesh.pipeline 16: is more than the 8 layers -> fewer stages"
    assert error.problem.mend == "fewer stages" and asked == ["mend"]
