"""Who holds up a run that makes no progress."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.core.plan import Mesh
from harness.core.run_files import HANG
from harness.launch import hang
from harness.launch.hang import Dump, reason, silent
from harness.launch.rank_names import NO_RANKS, RankNames

NAMES = RankNames(Mesh(data=1, pipeline=3, tensor=1), several=True)
ALONE = RankNames(Mesh(), several=False)


def rank(number: int, waiting: int = 2, seconds: float = 9.0, where: str = "in recv") -> Dump:
    return Dump(number, where, seconds, waiting, f"stack of {number}")


def launcher(*ranks: int, stopped: tuple[int, ...] = ()) -> Dump:
    return Dump(None, "", 0.0, 0, "stack of the launcher", ranks, stopped)


def test_a_rank_that_is_stopped_is_named_with_its_stage_and_has_no_stack() -> None:
    dumps = [launcher(0, 1, 2, stopped=(1,)), rank(0), rank(2)]
    assert silent(dumps, None) == [1]
    said = reason(dumps, NAMES)
    assert said.startswith("rank 1, stage 1 made no progress and wrote no Python stack: it is stopped (SIGSTOP)")
    assert said.endswith("the stacks of the others are in the log")


def test_no_stacks_of_others_where_all_are_stopped() -> None:
    said = reason([launcher(0, 1, stopped=(0, 1))], NAMES)
    assert "rank 0, stage 0 made no progress" in said and "rank 1, stage 1 made no progress" in said
    assert "others" not in said


def test_ranks_of_a_slurm_step_are_known_by_their_number() -> None:
    assert silent([rank(0), rank(2)], 3) == [1]
    assert "rank 1, stage 1 made no progress" in reason([rank(0), rank(2)], NAMES, 3)
    assert "rank 0, stage 0 made no progress" in reason([], NAMES, 2)


@pytest.mark.parametrize(
    ("dumps", "named"),
    [
        ([rank(0, 2, 99), rank(1, 0, 5, "in the forward pass of micro-batch 3"), rank(2, 2, 50)], 1),
        ([rank(0, 1, 9), rank(1, 2, 99), rank(2, 1, 10)], 2),
        ([rank(0, 2, 9), rank(1, 2, 11), rank(2, 2, 10)], 1),
    ],
)
def test_one_that_does_not_wait_for_others_holds_them_up_else_the_one_that_stands_longest(
    dumps: list[Dump], named: int
) -> None:
    found = reason([launcher(0, 1, 2), *dumps], NAMES)
    assert found.startswith(f"{NAMES.rank(named)} made no progress {dumps[named].where}")
    assert ("all ranks wait" in found) == all(one.waiting == 2 for one in dumps)


def test_all_that_do_not_wait_are_named_and_others_wait_only_where_there_are_some() -> None:
    where = "in the forward pass of micro-batch 3"
    two = reason([launcher(0, 1), rank(0, 0, 5, where), rank(1, 0, 4, where)], NAMES)
    assert f"rank 0, stage 0 made no progress {where} for 5 s" in two
    assert f"rank 1, stage 1 made no progress {where} for 4 s" in two
    assert "the others wait" not in two
    assert "the others wait" in reason([launcher(0, 1, 2), rank(0, 0, 5), rank(1, 0, 4), rank(2)], NAMES)
    names = RankNames(Mesh(data=1, pipeline=9, tensor=1), several=True)
    many = reason([launcher(*range(9)), *(rank(number, 0) for number in range(9))], names)
    assert "rank 3" in many and "rank 5" not in many and "5 others" in many


def test_processes_without_ranks() -> None:
    assert reason([launcher()], NO_RANKS).startswith("the worker made no progress")
    assert reason([launcher()], ALONE).startswith("rank 0, the only training process, made no progress")
    assert reason([], ALONE, worker_stopped=True).endswith("wrote no Python stack: it is stopped (SIGSTOP)")
    assert "or does not run Python code" in reason([], ALONE)


def test_a_file_in_the_place_of_the_stacks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user has put into the folder of a run, or what a full disk does not let be made."""
    monkeypatch.setattr(hang, "DUMP_S", 0.1)
    (tmp_path / HANG).write_text("mine")

    def speak() -> None:
        rank(0).save(tmp_path / HANG / "rank-0.json")

    with (tmp_path / "log").open("wb") as log:
        assert "rank 0" in hang.explain(tmp_path, NAMES, os.getpid(), 1, speak, log)
    hang.remove_dumps(tmp_path)
    assert not (tmp_path / HANG).exists()
