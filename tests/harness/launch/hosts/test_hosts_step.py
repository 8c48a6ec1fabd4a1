"""launch.hosts: what is refused, with fixes that work; hosts that do not answer; the end of all with the first one."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from harness.checks import configuration
from harness.cli.compose import compose
from harness.config import cluster_config
from harness.core import problem
from harness.core.plan import Mesh
from harness.core.problem import CannotRun
from harness.core.run_files import LOG
from harness.launch import rank_starter
from harness.launch.failure import ExitReasons
from harness.launch.hosts import agent, starter
from harness.launch.hosts.step import HostsStep
from tests.problems import rows

TINY = ["model=mlp", "cluster.device=cpu", "batch.size=16"]
HERE = ["sh", "-c", 'exec sh -c "$2"', "sh"]
"""In the place of ssh: every host is this one."""
RANK = """
import os, sys, time
rank = int(os.environ["RANK"])
os.write(1, f"rank {rank} {os.environ['LOCAL_RANK']} {os.environ['WORLD_SIZE']}{os.linesep}".encode())
if rank == 3 and sys.argv[2] == "fail":
    os.kill(os.getpid(), 9)
time.sleep(60 if sys.argv[2] == "fail" else 0)
"""


@pytest.mark.parametrize(
    ("typed", "key", "fix"),
    [
        (["launch.hosts=[a:2,b:1]"], "launch.hosts", ["a:1", "b:1"]),
        (["launch.hosts=[a:2,a:2,b:2]"], "launch.hosts", ["a:2", "b:2"]),
        (["launch.hosts=[a:1]"], "launch.hosts", []),
        (["launch.hosts=['a b']"], "launch.hosts", []),
        (["launch.hosts=[localhost:1,127.0.0.1:1]"], "launch.hosts", []),
        (["launch.hosts=[a:2,b:2]", "launch.ranks=fork"], "launch.ranks", "auto"),
        (["launch.hosts=[a:2,b:2]", "engine=gpipe"], "launch.hosts", []),
        (["launch.hosts=[a:2,b:2]", "engine=myelin"], "engine.transport", "torch"),
        (["launch.hosts=[a:2,b:2]", "launch.ssh="], "launch.ssh", problem.LEAVE_OUT),
        (["launch.hosts=[a:2,b:2]", 'launch.ssh="ssh -p \'22"'], "launch.ssh", problem.LEAVE_OUT),
    ],
)
def test_what_is_refused(typed: list[str], key: str, fix: object) -> None:
    typed = [*TINY, *([] if any("engine=" in word for word in typed) else ["engine=ddp"]), *typed]
    found = configuration.request_problems(compose(typed), typed)
    assert [one.key for one in found] == [key], rows(found)
    assert found[0].fixes[0] == {key: fix}
    fixed = problem.apply(typed, found[0].fixes[0])
    assert not configuration.request_problems(compose(fixed), fixed)


@pytest.mark.parametrize("hosts, refused", [
    ("[localhost:1,b:1]", True), ("[me@127.0.0.1:1,b:1]", True), ("[b:1,127.1.2.3:1]", True), ("[localhost:2]", False),
    ("[10.0.0.1:1,localhorse:1]", False),
])  # fmt: skip
def test_a_name_that_each_host_has_for_itself_is_for_one_host_alone(hosts: str, refused: bool) -> None:
    """Rank 0 would give the others that name, by which each finds itself."""
    typed = [*TINY, "engine=ddp", f"launch.hosts={hosts}"]
    found = configuration.request_problems(compose(typed), typed)
    assert [one.key for one in found] == ["launch.hosts"] * refused, rows(found)
    assert all("a name that each host has for itself" in one.message for one in found)


def test_inside_a_job_and_as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = [*TINY, "engine=ddp", "launch.hosts=[a:2,b:2]"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = configuration.request_problems(compose(typed), typed)
    assert [(one.key, one.fixes) for one in found] == [("launch.hosts", ({"launch.hosts": []},))]
    assert "SLURM_JOB_ID=7" in found[0].message


def test_more_and_fewer_ranks_than_the_mesh() -> None:
    config = compose([*TINY, "engine=ddp", "launch.hosts=[a:2,b:2]"])
    cluster = cluster_config.build(cluster_config.from_group(config.cluster), job=rank_starter.nodes(config))
    assert (cluster.nodes, cluster.devices_per_node) == (2, 2)
    found = rank_starter.step(config, Mesh(4), cluster)
    assert isinstance(found, HostsStep) and (found.hosts, found.each) == (("a", "b"), 2)
    with pytest.raises(CannotRun, match=r"has 4 ranks, the plan is for 3"):
        rank_starter.step(config, Mesh(3), cluster)
    many = compose([*TINY, "engine=ddp", "launch.hosts=[a:2,b:2,c:2]"])
    with pytest.raises(CannotRun) as error:
        rank_starter.step(many, Mesh(4), cluster)
    assert error.value.problems[0].fixes == ({"launch.hosts": ["a:2", "b:2"]},)


def test_as_many_ranks_as_devices() -> None:
    config = compose([*TINY, "engine=ddp", "launch.hosts=[a,b]", "cluster.devices=3"])
    found = rank_starter.nodes(config)
    assert found and found.tasks == (3, 3)


@pytest.mark.parametrize(
    ("ssh", "said"),
    [
        (["sh", "-c", "sleep 60"], "a: did not answer within 0.5 s"),
        (["sh", "-c", "echo no route to host; exit 255"], "a: was not reached, .* 255: no route to host"),
    ],
)
def test_a_host_that_is_not_reached(
    ssh: list[str], said: str, commands: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(starter, "ANSWER_S", 0.5)
    monkeypatch.setattr(starter, "END_S", 0.5)
    monkeypatch.setattr(starter.signal, "signal", lambda *_: None)
    begun = time.monotonic()
    assert starter.main(json.dumps({"hosts": ["a", "b"], "each": 2, "ssh": ssh}), ["x"]) == 1
    assert time.monotonic() - begun < 10
    (tmp_path / LOG).touch()
    reasons = ExitReasons(tmp_path / LOG, HostsStep(Mesh(4), ("a", "b"), 2, "ssh"))
    (tmp_path / LOG).write_text(capfd.readouterr().out)
    failure = reasons.explain(1)
    assert failure.status == "error" and re.match(said, failure.message)


def began(tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two hosts of two ranks, both here; the exit code."""
    monkeypatch.setattr(starter.signal, "signal", lambda *_: None)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(tmp_path / "rank.py"), "x", word, str(tmp_path)]
    return starter.main(json.dumps({"hosts": ["a", "b"], "each": 2, "ssh": HERE}), command)


def test_the_first_rank_that_fails_ends_all(
    commands: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    begun = time.monotonic()
    assert began(tmp_path, "fail", monkeypatch) == 1
    said = capfd.readouterr().out
    assert "b: rank 3 1 4\n" in said and "launch: error: b: task 3: Killed\n" in said, said
    assert time.monotonic() - begun < 40


def test_ranks_of_every_host(
    commands: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    assert began(tmp_path, "end", monkeypatch) == 0
    said = capfd.readouterr().out.splitlines()
    assert sorted(said) == ["a: rank 0 0 4", "a: rank 1 1 4", "b: rank 2 0 4", "b: rank 3 1 4"]


def test_another_version_of_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    monkeypatch.setenv(agent.CHECKED, "another")
    assert "another version than the parent's" in agent.unfit(tmp_path)
    monkeypatch.setattr(agent, "VISIBLE_S", 0.0)
    assert "is not there -> out= on a file system that all hosts share" in agent.unfit(tmp_path / "elsewhere")
