"""An MPI world of forked ranks: they find each other, and leave nothing after, whatever happens."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.launch import forked_ranks, mpi
from harness.launch.forked_ranks import RankKilled
from tests.problems import row
from tests.support.processes import children, left_in_shared_memory, shared_memory

pytestmark = pytest.mark.usefixtures("ranks")

SOON_S = 10.0


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    files, processes = shared_memory(), children()
    yield
    assert children() <= processes
    assert left_in_shared_memory(files) == set()


def passed_round() -> tuple[int, float, float]:
    """A message to the next rank by MPI, and a sum by gloo while it is under way."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    got, own = torch.empty(100_000), torch.full((100_000,), float(world.rank))
    requests = [world.Irecv(got, (world.rank - 1) % world.size), world.Isend(own, (world.rank + 1) % world.size)]
    total = torch.ones(1)
    dist.all_reduce(total)
    MPI.Request.Waitall(requests)
    assert dist.get_rank() == world.rank
    return world.size, float(got[-1]), float(total)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_forked_ranks_are_a_world_next_to_their_group(count: int) -> None:
    assert forked_ranks.run_on_ranks(count, passed_round, ("cpu",) * count, with_mpi=True) == (count, count - 1, count)


def test_ucx_reaches_the_memory_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on GPUs leave all of its ways to UCX: these work here, too, and leave nothing."""
    assert "UCX_TLS" in mpi._settings("cpu") and "UCX_TLS" not in mpi._settings("cuda:1")
    monkeypatch.setattr(mpi, "ON_CPUS", {})
    assert forked_ranks.run_on_ranks(2, passed_round, ("cpu",) * 2, with_mpi=True)[0] == 2


def test_two_worlds_one_after_the_other() -> None:
    for _ in range(2):
        assert forked_ranks.run_on_ranks(2, passed_round, ("cpu",) * 2, with_mpi=True)[0] == 2


def waiting(number: int, end: Any) -> Any:
    """Rank `number` ends somehow while the others wait for its message."""

    def work() -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == number:
            end()
        request = MPI.COMM_WORLD.Irecv(torch.empty(1), number)
        while not request.Test():
            time.sleep(1e-3)

    return work


def test_an_error_ends_all_ranks() -> None:
    def fail() -> None:
        raise ValueError("no")

    began = time.monotonic()
    with pytest.raises(ValueError, match="no"):
        forked_ranks.run_on_ranks(3, waiting(1, fail), ("cpu",) * 3, with_mpi=True)
    assert time.monotonic() - began < SOON_S


def test_a_rank_that_is_killed_ends_all() -> None:
    began = time.monotonic()
    with pytest.raises(RankKilled, match="rank 2"):
        forked_ranks.run_on_ranks(
            3, waiting(2, lambda: os.kill(os.getpid(), signal.SIGKILL)), ("cpu",) * 3, with_mpi=True
        )
    assert time.monotonic() - began < SOON_S


def test_a_killed_mpiexec_is_named_where_ranks_fail_after_it() -> None:
    with pytest.raises(ValueError, match="no") as raised, mpi.pmi_connections(2):
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if fields[1] == str(os.getpid()) and b"mpiexec" in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        time.sleep(0.1)
        raise ValueError("no")
    assert any("mpiexec" in note and "SIGKILL" in note for note in raised.value.__notes__)


def test_a_rank_that_ends_before_the_world_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shared memory has a name then: the host removes it."""

    def in_rank() -> None:
        assert shared_memory()
        raise ValueError("before")

    monkeypatch.setattr(mpi, "unlink_own_memory", in_rank)
    with pytest.raises(ValueError, match="before"):
        forked_ranks.run_on_ranks(2, passed_round, ("cpu",) * 2, with_mpi=True)


def test_what_a_killed_host_left_is_swept_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it may belong to a world that begins, and never what a process has."""
    left, held = (Path(f"/dev/shm/test_mpi_{os.getpid()}_{name}") for name in ("left", "held"))
    monkeypatch.setattr(mpi, "SHARED", "/dev/shm/test_mpi_")  # worlds of other tests sweep, too
    for path in (left, held):
        path.write_bytes(b"0")
    try:
        with held.open("r+b") as file, mmap.mmap(file.fileno(), 1):
            mpi.remove_orphaned_memory(time.time() + SOON_S)
            assert left.exists()
            monkeypatch.setattr(mpi, "STARTED_S", -1.0)
            mpi.remove_orphaned_memory(time.time() + SOON_S)
            assert (left.exists(), held.exists()) == (False, True)
    finally:
        for path in (left, held):
            path.unlink(missing_ok=True)


def test_mpiexec_that_starts_nothing_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = tmp_path / "mpiexec"
    bad.write_text("#!/bin/sh\necho mpiexec: no such thing >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setattr(mpi, "mpiexec", lambda: bad)
    with pytest.raises(mpi.NoWorld, match="no such thing -> pip install"):
        forked_ranks.run_on_ranks(2, passed_round, ("cpu",) * 2, with_mpi=True)


@pytest.mark.parametrize("says", ['exec "$@"', "sleep 100"])
def test_another_mpis_mpiexec_is_reported(says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that starts processes without wires, and one that starts none."""
    other = tmp_path / "mpiexec"
    other.write_text(f'#!/bin/sh\nwhile [ "$1" != -n ]; do shift; done\nshift 2\n{says}\n')
    other.chmod(0o755)
    monkeypatch.setattr(mpi, "mpiexec", lambda: other)
    monkeypatch.setattr(mpi, "HELPERS_S", 1.0)
    with pytest.raises(mpi.NoWorld, match="pip install"):
        forked_ranks.run_on_ranks(2, passed_round, ("cpu",) * 2, with_mpi=True)


def test_what_another_user_says_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all helpers seem to be another user's."""
    user = os.getuid()
    monkeypatch.setattr(mpi, "HELPERS_S", 1.0)
    monkeypatch.setattr(mpi.os, "getuid", lambda: user + 1)
    with pytest.raises(mpi.NoWorld, match="started no 2 ranks"):
        forked_ranks.run_on_ranks(2, passed_round, ("cpu",) * 2, with_mpi=True)


def test_inside_of_a_batch_job_ranks_start_here(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"JOB_ID": "1", "JOBID": "1", "NNODES": "2", "NODELIST": "node[1-2]", "JOB_NODELIST": "node[1-2]"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("HYDRA_HOST_FILE", "/nowhere")
    assert forked_ranks.run_on_ranks(2, passed_round, ("cpu",) * 2, with_mpi=True)[0] == 2


def test_a_rank_that_is_killed_at_the_very_end_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    left = dist.destroy_process_group

    def leaving() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        left()
        time.sleep(60)

    monkeypatch.setattr(dist, "destroy_process_group", leaving)
    began = time.monotonic()
    with pytest.raises(RankKilled, match="rank 1"):
        forked_ranks.run_on_ranks(2, passed_round, ("cpu",) * 2, with_mpi=True)
    assert time.monotonic() - began < SOON_S


def test_what_is_missing_is_reported_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hint() -> str:
        (problem,) = mpi.problems("engine.transport", "mpi", instead="torch")
        assert row(problem) == ("engine.transport", "mpi", ["engine.transport=torch"])
        return problem.hint

    assert mpi.problems("engine.transport", "mpi", instead="torch") == []
    monkeypatch.setenv("MPI4PY_MPIABI", "openmpi")
    assert hint() == "unset MPI4PY_MPIABI"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert hint() == mpi.INSTALL
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    assert hint() == mpi.INSTALL
