"""Ranks: what comes back from them, how they fail, and that none outlives its host."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.host import oom_killer
from harness.launch import forked_ranks
from harness.launch.die_with_parent import die_with
from harness.launch.process_group import is_first_rank
from harness.launch.signals import Preempted
from harness.launch.supervisor import ROOT
from tests.support.processes import children, there

pytestmark = pytest.mark.usefixtures("ranks")

CPUS = ("cpu",) * 4
LONG_S = 60.0
SOON_S = 10.0
"""Within so many seconds all is over, on a busy machine; it takes tenths of one."""


class Odd(Exception):
    """One that can be packed, but not unpacked: its arguments are not those of its constructor."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


def in_rank(number: int, work: Callable[[], object]) -> Callable[[], object]:
    """`work` in one rank; all others wait for it in a collective."""

    def wait() -> None:
        dist.all_reduce(torch.zeros(1))

    return lambda: work() if dist.get_rank() == number else wait()


def failing(error: BaseException) -> Callable[[], NoReturn]:
    def work() -> NoReturn:
        raise error

    return work


@pytest.fixture(autouse=True)
def nothing_stays() -> object:
    before = children()
    started = time.monotonic()
    yield
    assert children() == before
    assert not multiprocessing.active_children()
    assert time.monotonic() - started < SOON_S


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_rank_0_returns_comes_back(count: int) -> None:
    def work() -> tuple[int, int, Tensor]:
        total = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), total

    rank, size, total = forked_ranks.run_on_ranks(count, work, CPUS)
    assert (rank, size, float(total)) == (0, count, count * (count + 1) / 2)


def test_a_result_larger_than_a_pipe_comes_back() -> None:
    assert forked_ranks.run_on_ranks(2, lambda: bytes(1_000_000), CPUS) == bytes(1_000_000)


def test_only_one_reports() -> None:
    def work() -> list[bool]:
        found: list[bool] = [False] * 3
        dist.all_gather_object(found, is_first_rank())
        return found

    assert forked_ranks.run_on_ranks(3, work, CPUS) == [True, False, False]
    assert is_first_rank(), "a process without ranks is its own first"


def test_each_rank_knows_its_place_and_computes_with_one_thread() -> None:
    def work() -> list[object]:
        mine = ([os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")], torch.get_num_threads())
        found: list[object] = [None] * 2
        dist.all_gather_object(found, mine)
        return found

    assert forked_ranks.run_on_ranks(2, work, CPUS) == [(["0", "2", "0"], 1), (["1", "2", "1"], 1)]


def test_ranks_meet_at_a_port_of_this_machine_that_is_gone_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that NCCL's threads ask all the time, and no file that each of them locks and reads again."""
    ports: list[int] = []
    plain = dist.TCPStore

    def store(host: str, port: int, *rest: Any, **keys: Any) -> dist.TCPStore:
        ports.append(port)
        return plain(host, port, *rest, **keys)

    monkeypatch.setattr(dist, "TCPStore", store)
    (port,) = forked_ranks.run_on_ranks(2, lambda: ports, CPUS)
    with pytest.raises(ConnectionRefusedError), socket.create_connection((forked_ranks.HERE, port)):
        pass


def test_a_process_that_uses_a_gpu_forks_no_ranks_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not use it, and CUDA's own message does not say who has."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="has started CUDA"):
        forked_ranks.run_on_ranks(2, lambda: 1, ["cuda:0", "cuda:1"])
    assert forked_ranks.run_on_ranks(2, lambda: 1, CPUS) == 1


def test_the_host_stays_as_it_was() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    former = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        before = dict(os.environ), [signal.getsignal(number) for number in numbers], torch.get_num_threads()
        inside = forked_ranks.run_on_ranks(2, lambda: [signal.getsignal(number) for number in numbers[:3]], CPUS)
        after = dict(os.environ), [signal.getsignal(number) for number in numbers], torch.get_num_threads()
    finally:
        signal.signal(signal.SIGTERM, former)
    assert inside == [signal.SIG_DFL] * 3, "a host's handlers are not the ranks'"
    assert after == before
    assert not dist.is_initialized()


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_comes_with_its_notes_and_its_traceback(number: int) -> None:
    error = ValueError("too much")
    error.add_note("in stage 1")
    with pytest.raises(ValueError, match="too much") as caught:
        forked_ranks.run_on_ranks(2, in_rank(number, failing(error)), CPUS)
    assert caught.value.__notes__ == ["in stage 1"]
    reported = str(caught.value.__cause__)
    assert reported.startswith(f"in rank {number}:\nTraceback")
    assert "raise error" in reported


def test_the_first_error_is_not_hidden_by_those_that_follow() -> None:
    """The other ranks lose their connection and fail, too."""
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            forked_ranks.run_on_ranks(3, in_rank(1, lambda: 1 // 0), CPUS)


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_a_lost_connection_is_not_the_cause(late_s: float) -> None:
    """The message of a rank that has lost its peer may be read first, or even arrive first."""

    def function() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:22415")
        time.sleep(late_s)
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        forked_ranks.run_on_ranks(2, function, CPUS)


def test_a_lost_connection_alone_is_an_error() -> None:
    def function() -> None:
        if dist.get_rank() == 0:
            raise RuntimeError("Connection closed by peer")
        dist.barrier()

    with pytest.raises(RuntimeError, match="closed"):
        forked_ranks.run_on_ranks(2, function, CPUS)


def test_an_error_that_cannot_be_packed_is_reported() -> None:
    class Local(Exception):
        pass

    for error, reported in ((Local("here"), "Local: here"), (Odd("number", 3), "Odd: number 3")):
        error.add_note("in stage 1")
        with pytest.raises(forked_ranks.RankDied, match=reported) as caught:
            forked_ranks.run_on_ranks(2, in_rank(1, failing(error)), CPUS)
        assert caught.value.__notes__ == ["in stage 1"]


def test_a_result_that_cannot_be_packed_is_an_error() -> None:
    with pytest.raises(Exception, match=r"[Pp]ickle"):
        forked_ranks.run_on_ranks(2, lambda: lambda: None, CPUS)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed(number: int) -> None:
    """The other one fails, too, at the same moment, and is not believed."""
    for _ in range(10):
        with pytest.raises(forked_ranks.RankKilled, match=rf"rank {number} was killed .*OOM killer") as caught:
            forked_ranks.run_on_ranks(2, in_rank(number, lambda: os.kill(os.getpid(), signal.SIGKILL)), CPUS)
        assert not isinstance(caught.value, MemoryError), "the kernel has ended nothing"


def test_a_rank_that_the_kernel_has_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter((7, 8))
    monkeypatch.setattr(oom_killer, "kill_count", lambda: next(counted))
    with pytest.raises(
        forked_ranks.RankKilled, match=r"rank 1 was killed .* by the kernel's OOM killer .out of memory.: the"
    ) as caught:
        forked_ranks.run_on_ranks(2, in_rank(1, lambda: os.kill(os.getpid(), signal.SIGKILL)), CPUS)
    assert isinstance(caught.value, MemoryError), "a run ends as out of memory"


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGTERM, r"15 \(SIGTERM\)"), (signal.SIGBUS, r"7 \(SIGBUS\); of .* shared memory")]
)
def test_a_rank_that_ends_by_another_signal(number: signal.Signals, words: str) -> None:
    with pytest.raises(forked_ranks.RankDied, match=f"rank 1 ended by signal {words}"):
        forked_ranks.run_on_ranks(2, in_rank(1, lambda: os.kill(os.getpid(), number)), CPUS)


@pytest.mark.parametrize("code", [0, 7])
def test_a_rank_that_leaves_without_a_word(code: int) -> None:
    with pytest.raises(forked_ranks.RankDied, match=f"rank 1 ended with exit code {code}"):
        forked_ranks.run_on_ranks(2, in_rank(1, lambda: os._exit(code)), CPUS)


def test_a_rank_that_asks_to_exit_is_an_error() -> None:
    with pytest.raises(SystemExit) as caught:
        forked_ranks.run_on_ranks(2, in_rank(1, lambda: sys.exit("no")), CPUS)
    assert caught.value.code == "no"


def test_a_rank_that_does_not_listen_ends_with_the_others() -> None:
    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if dist.get_rank() == 0:
            raise KeyError("gone")
        time.sleep(LONG_S)

    with pytest.raises(KeyError, match="gone"):
        forked_ranks.run_on_ranks(3, work, CPUS)


def test_a_host_that_is_ended_takes_its_ranks_along() -> None:
    """Whatever its signal handler raises comes out, once the ranks are gone."""

    def end(number: int, frame: object) -> None:
        raise Preempted("enough")

    former = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Preempted, match="enough"):
            forked_ranks.run_on_ranks(2, lambda: time.sleep(LONG_S), CPUS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


HOST = """
import os, time
from harness.launch import forked_ranks
from harness.launch.die_with_parent import die_with

def work():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(60)

forked_ranks.run_on_ranks(2, work, ("cpu", "cpu"), with_mpi=True)
"""


def test_ranks_of_a_host_that_is_killed_end_and_leave_nothing(tmp_path: Path) -> None:
    places = os.environ | {"TMPDIR": str(tmp_path)}
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=places)
    assert host.stdout
    pids = [int(host.stdout.readline()) for _ in range(2)]
    assert all(map(there, pids))
    host.kill()
    host.wait()
    host.stdout.close()
    deadline = time.monotonic() + SOON_S / 2
    while any(map(there, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(there, pids))
    assert not list(tmp_path.iterdir())


def test_a_rank_whose_host_is_gone_before_it_begins_ends() -> None:
    """The kernel's promise holds from the call on; what happened before is looked up."""
    pid = os.fork()
    if pid == 0:
        die_with(os.getpid())  # its parent is another process: as after a host's death
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_collections_in_a_rank_leave_the_hosts_objects_alone() -> None:
    there, here = forked_ranks.run_on_ranks(2, lambda: (gc.get_freeze_count(), len(gc.get_objects())), CPUS)
    assert there > 10 * here
    assert gc.get_freeze_count() == 0
