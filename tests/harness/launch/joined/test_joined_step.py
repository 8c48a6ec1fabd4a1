"""One of the ranks that torchrun has started: what its variables say, what is refused, how others end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import run
from harness.checks import configuration
from harness.cli.compose import compose
from harness.config import cluster_config
from harness.config.cluster_config import ClusterConfig
from harness.core.plan import Mesh
from harness.core.problem import CannotRun
from harness.core.record import Status
from harness.core.run_files import ERROR, LOG
from harness.host import devices, launched
from harness.host.devices import DetectedDevices
from harness.launch import rank_starter, slurm_log, supervisor
from harness.launch.failure import ExitReasons, Failure
from harness.launch.joined import herald
from harness.launch.joined.step import JoinedStep
from harness.launch.supervisor import Outcome
from tests.problems import rows

RANK_0 = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
          "MASTER_PORT": "1"}  # fmt: skip
TINY = ["model=mlp", "cluster.device=cpu", "batch.size=16"]
LOST = "RuntimeError: Connection closed by peer [10.0.0.2]:4711\nin rank 0"


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is rank 0 of two nodes of two."""
    for name, value in RANK_0.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


PARENT = """
import time
from harness.launch.joined import herald
with herald.started():
    print("started", flush=True)
    time.sleep(600)
"""


@pytest.mark.full
def test_a_herald_whose_parent_is_killed_does_not_wait_for_ranks_that_never_come() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = os.environ | RANK_0 | {"MASTER_PORT": str(port)}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=variables, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"started\n"
        (child,) = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # until it waits for the ranks
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        begun = time.monotonic()
        parent.send_signal(signal.SIGKILL)
    while Path(f"/proc/{child}").exists() and time.monotonic() < begun + 60:
        time.sleep(0.1)
    assert time.monotonic() - begun < herald.LAST_S + 5


def test_its_place() -> None:
    third = RANK_0 | {"RANK": "3", "LOCAL_RANK": "1"}
    in_a_step = third | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}  # srun torchrun
    assert launched.place(third) == launched.place(in_a_step)
    assert (launched.place(third).rank, launched.place(third).local, launched.place(third).count) == (3, 1, 4)
    found = launched.group(third)
    assert found and found.tasks == (2, 2)
    assert not launched.several({"WORLD_SIZE": "1", "RANK": "0"}) and launched.group({}) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"RANK": ""}, "RANK"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT x"),
        ({"LOCAL_WORLD_SIZE": "3"}, "unequal numbers of ranks"),
        ({"RANK": "2", "LOCAL_WORLD_SIZE": "4"}, "unequal numbers of ranks"),
        ({"RANK": "4"}, "unequal numbers of ranks"),
    ],
)
def test_variables_that_do_not_fit(changed: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["engine=ddp"], RANK_0 | changed) == 2
    said = capsys.readouterr()
    assert named in " ".join(said.err.split()) and "torchrun" in said.err and said.out == ""


def test_its_devices_are_the_ranks(first: pytest.MonkeyPatch) -> None:
    for kind in ("cpu", "cuda"):
        there = DetectedDevices(kind, "x", 8, 8 << 30)
        first.setattr(devices, "detect", lambda asked, there=there: there)
        cluster = cluster_config.build(ClusterConfig(device=kind), job=launched.group())
        assert (cluster.nodes, cluster.devices_per_node) == (2, 2)
    with pytest.raises(CannotRun, match=r"cluster.nodes 3 +the ranks are on 2 \(WORLD_SIZE=4, LOCAL_WORLD_SIZE=2\)"):
        cluster_config.build(ClusterConfig(device="cpu", nodes=3), job=launched.group())


@pytest.mark.parametrize(
    ("typed", "key", "fix"),
    [
        (["engine=single"], "engine", {"engine": "ddp"}),
        (["engine=gpipe"], "engine", None),
        (["engine=ddp", "launch.ranks=srun"], "launch.ranks", {"launch.ranks": "auto"}),
        (["engine=ddp", "launch.ranks=fork"], "launch.ranks", {"launch.ranks": "auto"}),
        (["engine=myelin"], "engine.transport", {"engine.transport": "torch"}),
    ],
)
def test_what_is_refused(first: pytest.MonkeyPatch, typed: list[str], key: str, fix: dict[str, str] | None) -> None:
    typed = [*TINY, *typed]
    found = configuration.request_problems(compose(typed), typed)
    assert [problem.key for problem in found] == [key], rows(found)
    if fix is None:
        assert found[0].hint == "python run.py ... without torchrun"
        return
    assert found[0].fixes[0] == fix
    fixed = [*(word for word in typed if word.partition("=")[0] not in fix), *(f"{k}={v}" for k, v in fix.items())]
    assert not configuration.request_problems(compose(fixed), fixed)


def test_another_number_of_ranks_than_planned(first: pytest.MonkeyPatch) -> None:
    config = compose([*TINY, "engine=ddp"])
    cluster = cluster_config.build(ClusterConfig(device="cpu"), job=launched.group())
    found = rank_starter.step(config, Mesh(4), cluster)
    assert isinstance(found, JoinedStep) and found.command() == [] and found.starts_one
    with pytest.raises(CannotRun, match=r"WORLD_SIZE 4 +ranks are started, the plan is for 2"):
        rank_starter.step(config, Mesh(2), cluster)


@pytest.mark.parametrize("asked", ["mode=race", "mode=fit", "mode=tune", "--multirun"])
def test_commands_that_start_several_runs(asked: str) -> None:
    options = run._parser().parse_args(["engine=ddp", asked])
    with pytest.raises(CannotRun, match="starts runs of its own"):
        run._refuse_many_runs(options, launched.place(RANK_0))


@pytest.mark.parametrize(
    ("code", "how", "status", "reason"),
    [
        (-9, "", "error", "rank 3, stage 0, on right was killed (signal 9): by hand"),
        (-11, "", "error", "rank 3, stage 0, on right ended by a signal: Segmentation fault"),
        (-9, "Out Of Memory", "oom", "rank 3, stage 0, on right was killed: the memory of its control group was full"),
    ],
)
def test_the_end_of_a_rank_on_another_node(code: int, how: str, status: Status, reason: str, tmp_path: Path) -> None:
    """It is known later than that this node has lost its connection."""
    (tmp_path / LOG).touch()
    reasons = ExitReasons(tmp_path / LOG, JoinedStep(Mesh(4)))
    Failure("error", LOST, rank=0).report(tmp_path)

    def late() -> None:
        time.sleep(0.2)
        (tmp_path / LOG).write_text(slurm_log.task_line("right", 3, code, how))

    thread = threading.Thread(target=late)
    thread.start()
    failure = reasons.explain(1)
    thread.join()
    assert failure.status == status and failure.message.startswith(reason)


@pytest.mark.parametrize("code", [-9, 3])
def test_the_report_of_a_ranks_parent_comes_first(code: int, tmp_path: Path) -> None:
    """Before any other rank has lost its connection: the reason names the rank all the same."""
    (tmp_path / LOG).touch()
    reasons = ExitReasons(tmp_path / LOG, JoinedStep(Mesh(4)))
    line = slurm_log.task_line("right", 3, code)
    (tmp_path / LOG).write_text(line)
    Failure("error", line.strip(), rank=3).report(tmp_path)
    assert reasons.explain(1).message.startswith("rank 3, stage 0, on right ")


def test_an_error_of_another_rank_and_a_signal_to_this_one(tmp_path: Path) -> None:
    (tmp_path / LOG).touch()
    reasons = ExitReasons(tmp_path / LOG, JoinedStep(Mesh(4)))
    Failure("error", "ValueError: no luck\nin rank 2", rank=2).report(tmp_path)
    begun = time.monotonic()
    assert reasons.explain(1).message == "ValueError: no luck\nin rank 2"
    assert time.monotonic() - begun < 1, "it is the cause: nothing else is waited for"
    assert "rank 0, stage 0, ended by signal 11" in reasons.explain(-11).message


def test_a_rank_that_does_not_notice_that_another_one_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commands: None
) -> None:
    monkeypatch.setattr(supervisor, "LOST_S", 0.2)

    def look() -> None:
        if not (tmp_path / ERROR).exists():
            Failure("error", "ValueError: no luck\nin rank 2", rank=2).report(tmp_path)

    begun = time.monotonic()
    outcome = supervisor.supervise(["sleep", "60"], tmp_path, 50, look, JoinedStep(Mesh(4)))
    assert outcome == Outcome("error", "ValueError: no luck\nin rank 2")
    assert time.monotonic() - begun < 30
