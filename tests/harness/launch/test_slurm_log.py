"""How a step ended, by what Slurm 22.05 prints."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from harness.core.error_notes import RankNote
from harness.core.plan import Mesh
from harness.core.run_files import ERROR
from harness.host import oom_killer
from harness.launch.failure import DISK_FULL, ExitReasons, Failure
from harness.launch.slurm_log import last_line, step_end
from harness.launch.slurm_step import Step

KILLED = """\
srun: error: node1: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=3.1
slurmstepd-node1: error: *** STEP 3.1 ON node1 CANCELLED AT 2026-11-22T10:54:53 ***
srun: error: node1: task 0: Terminated
srun: error: node2: tasks 2-3: Terminated
srun: Force Terminated StepId=3.1
"""
RAISED = KILLED.replace("Killed", "Exited with exit code 1")
CANCELLED = """\
slurmstepd-node1: error: *** STEP 4.0 ON node1 CANCELLED AT 2026-11-22T11:00:00{why} ***
srun: error: node2: tasks 2-3: Terminated
"""
NODE = """\
srun: error: Node failure on node2
slurmstepd-node1: error: *** STEP 4.0 ON node1 CANCELLED AT 2026-11-22T11:00:00 ***
srun: error: node1: tasks 0-1: Killed
"""
MEMORY = """\
slurmstepd: error: Detected 1 oom-kill event(s) in StepId=5.0. Some of your processes may have been killed.
srun: error: node1: task 0: Killed
srun: error: node2: task 3: Out Of Memory
"""


BUSY = "srun: error: Unable to create step for job 4: Requested nodes are busy\n"


@pytest.mark.parametrize(
    ("said", "status", "rank", "words"),
    [
        (KILLED, "error", 1, "rank 1, stage 1, on node1 was killed (signal 9)"),
        (RAISED, "error", 1, "rank 1, stage 1, on node1 ended with exit code 1: ValueError: no"),
        (KILLED.replace("Killed", "Segmentation fault (core dumped)"), "error", 1, "by a signal: Segmentation fault"),
        (CANCELLED.format(why=""), "preempted", None, "Slurm cancelled the ranks"),
        (CANCELLED.format(why=" DUE TO PREEMPTION"), "preempted", None, "gave the nodes to another job"),
        (CANCELLED.format(why=" DUE TO TIME LIMIT"), "timeout", None, "time limit"),
        (CANCELLED.format(why=" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"), "node_lost", None, "NODE FAIL"),
        (NODE, "node_lost", None, "Node failure on node2"),
        (MEMORY, "oom", 3, "rank 3, stage 1, on node2 was killed: the memory of its control group was full"),
        (KILLED.replace("Killed", "Exited with exit code 28"), "error", 1, DISK_FULL),
        (
            "srun: error: lost, a plugin had exit code 28\n",
            "error",
            None,
            "srun lost the ranks, which had started: lost",
        ),
        (BUSY, "error", None, "srun lost the ranks, which had started: Unable to create step"),
        ("", "error", None, "srun ended with exit code 143: ValueError: no"),
    ],
)
def test_the_first_end_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, status: str, rank: int | None, words: str
) -> None:
    monkeypatch.setattr(oom_killer, "kill_count", lambda: 0)
    (tmp_path / "log").write_text("srun: error: node9: task 9: Killed\nof an earlier start\n")
    reasons = ExitReasons(tmp_path / "log", Step(Mesh(2, 2), 2, False))
    with (tmp_path / "log").open("a") as log:
        log.write("step 1\nValueError: no\n" + said)
    reported = reasons.explain(143)
    assert (reported.status, reported.rank) == (status, rank) and words in reported.message


@pytest.mark.parametrize(
    ("said", "again", "words"),
    [
        (BUSY, [True, True, False], "had no nodes of the job for the ranks within 60 s: Unable to create step"),
        ("srun: error: Only allocated 2 nodes asked for 3\n", [False], "started no ranks: Only allocated"),
        ("loading torch\nstep 0: loss 0.7\nsrun: error: Socket timed out on send/recv operation\n", [False],
         "lost the ranks, which had started: Socket timed out"),
        ("MPIDI_UCX_comm_addr_exchange(159).....:  Invalid parameter\n" + RAISED, [True, True, False],
         "rank 1, stage 1, on node1 ended with exit code 1: MPIDI_UCX_comm_addr_exchange(159)"),
        (RAISED, [False], "rank 1, stage 1, on node1 ended with exit code 1"),
        ("MPIDI_UCX_comm_addr_exchange\n" + CANCELLED.format(why=" DUE TO TIME LIMIT"), [False], "Slurm's time limit"),
    ],
)  # fmt: skip
def test_ranks_that_have_begun_are_not_started_again(tmp_path: Path, said: str, again: list[bool], words: str) -> None:
    (tmp_path / "log").write_text("step 1: of an earlier start, which continues here\n")
    reasons = ExitReasons(tmp_path / "log", Step(Mesh(2, 2), 2, False))
    for number, expected in enumerate(again):
        with (tmp_path / "log").open("a") as log:
            log.write(said)
        assert words in reasons.explain(1).message
        assert reasons.try_again() == expected, number


def test_a_kill_of_the_kernel_on_this_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter((0, 1, 1, 1))
    monkeypatch.setattr(oom_killer, "kill_count", lambda: next(kills))
    reasons = ExitReasons(tmp_path / "log", Step(Mesh(2, 2), 2, False))
    (tmp_path / "log").write_text(KILLED)
    reported = reasons.explain(143)
    assert reported.status == "oom" and reported.message.startswith(
        "rank 1, stage 1, was killed (signal 9), by the kernel"
    )


@pytest.mark.parametrize(
    ("said", "rank", "status", "words"),
    [
        (RAISED, 1, "error", "ValueError: mine"),
        (RAISED, 0, "error", "ValueError: mine"),  # rank 1 ended sooner, but rank 0 has failed first
        (KILLED, 0, "error", "rank 1, stage 1, on node1 was killed"),  # rank 0 has lost its connection to rank 1
        (NODE, 0, "node_lost", "Node failure on node2"),
        (MEMORY, 0, "oom", "rank 3"),
    ],
)
def test_what_a_rank_says_and_what_follows_from_others(
    tmp_path: Path, said: str, rank: int, status: str, words: str
) -> None:
    reasons = ExitReasons(tmp_path / "log", Step(Mesh(2, 2), 2, False))
    (tmp_path / "log").write_text(said)
    Failure.of(ValueError("mine"), rank).report(tmp_path)
    reported = reasons.explain(1)
    assert reported.status == status and words in reported.message


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:4", "rank 1, stage 1, on node1 was killed (signal 9)"),
        ("NCCL error: ncclRemoteError: A call failed", "rank 1, stage 1, on node1 was killed (signal 9)"),
        ("mine", "ValueError: mine"),
    ],
)
def test_a_lost_connection_follows_from_a_kill_that_is_reported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, wanted: str
) -> None:
    """srun kills ranks that do not end when another has failed: then its report is the cause."""
    monkeypatch.setattr(oom_killer, "kill_count", lambda: 0)
    reasons = ExitReasons(tmp_path / "log", Step(Mesh(2, 2), 2, False))
    exited = "srun: error: node1: task 0: Exited with exit code 1\nsrun: error: node2: task 3: Terminated\n"
    (tmp_path / "log").write_text(exited + KILLED)
    Failure.of(ValueError(message), 0).report(tmp_path)
    assert wanted in reasons.explain(1).message


def test_the_first_rank_that_fails_is_reported(tmp_path: Path) -> None:
    for rank in (2, 0):
        Failure.of(ValueError(f"of {rank}"), rank).report(tmp_path)
    reported = Failure.load(tmp_path / ERROR)
    assert (reported.rank, reported.message) == (2, "ValueError: of 2\nin rank 2 on " + socket.gethostname())
    assert [path.name for path in tmp_path.iterdir()] == [ERROR]


def test_a_rank_is_named_unless_a_note_names_it() -> None:
    said = "ValueError: no peer in rank 1\nin rank 1 on " + socket.gethostname()
    assert Failure.of(ValueError("no peer in rank 1"), 1).message == said
    noted = ValueError("mine")
    noted.add_note(RankNote("in rank 1, stage 1, in the report of a step"))
    assert Failure.of(noted, 1).message == "ValueError: mine\nin rank 1, stage 1, in the report of a step"


def test_slurms_own_lines_are_not_the_last_word() -> None:
    assert last_line("a\nImportError: b\n" + RAISED) == "ImportError: b"
    assert step_end("all is well\n", str, 1) is None
