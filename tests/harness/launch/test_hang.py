"""Who holds up a run that makes no progress."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.core.plan import Mesh
from harness.core.run_files import FLIGHT_RECORDER, HANG
from harness.interfaces import Activity
from harness.launch import forked_ranks, hang, process_group
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


def test_each_rank_leaves_its_last_collectives(tmp_path: Path, ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch's flight recorder: of two all-reduces of rank 0, rank 1 never began the second one."""
    monkeypatch.setattr(hang, "DUMP_S", 0.1)
    (tmp_path / FLIGHT_RECORDER).mkdir()
    (tmp_path / FLIGHT_RECORDER / "rank_7").touch()  # of an earlier start

    def work() -> None:
        number = dist.get_rank()
        dist.all_reduce(torch.ones(4))
        second = dist.all_reduce(torch.ones(5), async_op=True) if number == 0 else None
        hang.dump(tmp_path, number, Activity("in all_reduce", 9.0, True), {})
        if second is None:
            dist.all_reduce(torch.ones(5))  # so that both can end
        else:
            second.wait()

    def speak() -> None:
        forked_ranks.run_on_ranks(2, work, ("cpu", "cpu"))

    with (tmp_path / "log").open("wb") as log:
        said = hang.explain(tmp_path, NAMES, os.getpid(), 2, speak, log)
    assert said.endswith(f", the last collectives of each rank in {FLIGHT_RECORDER}/")
    written = {path.name: pickle.loads(path.read_bytes()) for path in (tmp_path / FLIGHT_RECORDER).iterdir()}
    sizes = {name: [one["input_sizes"] for one in found["entries"]] for name, found in written.items()}
    assert sizes == {"rank_0": [[[4]], [[5]]], "rank_1": [[[4]]]}


def test_a_process_without_ranks_leaves_no_collectives(tmp_path: Path) -> None:
    (tmp_path / HANG).mkdir()
    hang.dump(tmp_path, None, Activity(), {})
    hang.dump(tmp_path, 0, Activity(), {})  # it has not met others yet
    assert [path.name for path in tmp_path.iterdir()] == [HANG]


def test_on_gpus_they_are_those_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps gloo's and NCCL's apart."""
    (tmp_path / HANG).mkdir()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: process_group.ON_GPUS)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"NCCL's", raising=False)
    hang.dump(tmp_path, 3, Activity(), {})
    assert (tmp_path / FLIGHT_RECORDER / "rank_3").read_bytes() == b"NCCL's"
