"""`mode=tune` with an order of tasks that the user gives: in a file, which is read once; all of them, which is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import DictConfig

from harness.cli.compose import compose
from harness.core.problem import CannotRun, ProblemError
from harness.core.record import RunRecord
from harness.planning.tune.result import Tuned
from harness.report.progress import Progress
from harness.schedule import action_check, action_file, plan_order
from harness.sweep import run_point
from harness.sweep.points import Point
from tests.harness.planning.tune.nets import FLAT, Nets, tuned
from tests.harness.planning.tune.test_work_done_once import counted
from tests.problems import keys, refused, rows

TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
RECOMPUTES = "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1R0,1B0,1F1,1R1,1B1\n"
SOME = "0F0,0F1,0R0,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def made(folder: Path, content: str) -> str:
    path = folder / "own.csv"
    path.write_text(content)
    return f"engine.schedule={path}"


def searched(folder: Path, *typed: str) -> Tuned:
    return tuned(folder, "batch.size=16", *typed)


def test_a_file_is_read_and_checked_once_for_all_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_order._parsed.cache_clear()  # plans of other tests may have the same order
    of_file, of_order = made(tmp_path, TWO), counted(monkeypatch, action_file, "cell_of")
    parsed, checked = counted(monkeypatch, action_file, "parse"), counted(monkeypatch, action_check, "problems")
    found = searched(tmp_path, "engine=torch_pipelining", of_file)
    assert {line.candidate.mesh.pipeline for line in found.simulated} == {2} and len(found.lines) > 20
    assert parsed.calls == checked.calls == 1
    assert of_order.calls == 2 * 8, "the cells of the file, and those of the plans, which are equal"


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    for number, content in enumerate((TWO, TWO.replace("0B0,0B1", "0B1,0B0"), "0F0,0B0\n1F0,1B0\n", TWO)):
        path.write_text(content)
        os.utime(path, (number, number))  # some file systems know no shorter times than a few milliseconds
        assert action_file.read(path) == action_file.parse(content, "own.csv")
        assert bool(plan_order.refused(str(path), micro_batches=1)) == (content.count("0F") > 1)
    path.write_text(TWO.replace("0B1", "0B0"))
    os.utime(path, (9, 9))
    assert plan_order.refused(str(path))
    path.unlink()
    with pytest.raises(ProblemError, match="cannot be read"):
        action_file.read(path)


@pytest.mark.parametrize(("content", "shown"), [(TWO, "never"), (RECOMPUTES, "always"), (SOME, "some")])
def test_a_row_says_what_the_file_recomputes(content: str, shown: str, tmp_path: Path) -> None:
    found = searched(tmp_path, "engine=pipeline", made(tmp_path, content))
    assert {one.recomputation for one in found.rows} == {shown}


def test_what_torch_lacks_is_said_with_the_sizes(tmp_path: Path) -> None:
    of_file = made(tmp_path, RECOMPUTES)
    found = run_point.composed(Point.of(["engine=torch_pipelining", *FLAT, "mode=plan", of_file]))
    assert isinstance(found, RunRecord)
    assert [one[-1] for _, _, one in rows(found.problems)] == [
        "mesh.pipeline=2",
        "batch.micro_batches=2",
        f"engine=pipeline {of_file}",
    ]


@pytest.mark.parametrize("cluster", [FLAT, ["cluster=local"]])
def test_all_schedules_are_none_to_search_with(cluster: list[str], tmp_path: Path) -> None:
    """On a described cluster, all candidates had the times of 1F1B."""
    overrides = ["mode=tune", *cluster, "engine=pipeline", "engine.schedule=all", "batch.size=16"]
    with pytest.raises(CannotRun) as caught:
        Nets(compose(overrides), overrides, tmp_path, Progress()).search()
    assert rows(refused(caught)) == [("engine.schedule", "all", ["without engine.schedule", "mode=plan"])]


def test_the_point_of_a_search_is_not_refused_for_a_mesh_that_it_does_not_have(tmp_path: Path) -> None:
    """mode=tune engine=pipeline,torch_pipelining refused files that mode=tune engine=pipeline takes."""
    for engine in ("pipeline", "torch_pipelining"):
        typed = ["mode=tune", *FLAT, f"engine={engine}", "batch.size=16", made(tmp_path, TWO)]
        assert isinstance(run_point.composed(Point.of(typed)), DictConfig)
    for more in (["engine.schedule=all"], ["precision=fp16"]):
        found = run_point.composed(Point.of(["mode=tune", *FLAT, "engine=pipeline", *more]))
        assert isinstance(found, RunRecord) and keys(found.problems) == [more[0].partition("=")[0]]


def test_a_file_that_recomputes_is_not_ruled_out_by_what_others_keep(tmp_path: Path) -> None:
    """Devices of a V need the activations of one of their two stages at once."""
    rows_ = "0F0,3F0,3R0,3B0,0R0,0B0\n1F0,2F0,2R0,2B0,1R0,1B0\n"
    typed = ["engine=pipeline", "mesh.pipeline=2", "mesh.data=1", "batch.micro_batches=1", "cluster.memory_gb=0.07"]
    found = searched(tmp_path, *typed, made(tmp_path, rows_))
    assert max(line.simulated_memory_bytes or 0 for line in found.simulated) < 0.07e9
    with pytest.raises(CannotRun, match="memory"):
        searched(tmp_path, *typed, made(tmp_path, rows_.replace("3R0,", "").replace("0R0,", "")))
