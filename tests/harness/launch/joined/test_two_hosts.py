"""Ranks that torchrun, or a launcher with its variables, starts on two hosts: they compute what one process does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import run
from harness.core.run_files import RENDEZVOUS
from tests.support.two_hosts import INTERFACE, NAMES, TwoHosts, two_hosts

ROOT = Path(__file__).resolve().parents[4]
TINY = ["model=mlp", "model.widths=[8,16,16,4]", "batch.size=16", "batch.micro_batches=2", "cluster.device=cpu",
        "precision=fp64", "warmup=1", "tracker=none"]  # fmt: skip
ENGINES = {
    "ddp": ["engine=ddp"],
    "pipeline": ["engine=pipeline", "mesh.pipeline=2", "mesh.data=2"],
    "myelin": ["engine=myelin", "engine.transport=torch", "mesh.pipeline=2", "mesh.data=2"],
}
LIMIT_S = 200.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as found:
        yield found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def torchrun(hosts: TwoHosts, host: str, port: int, arguments: Sequence[str]) -> list[str]:
    """The command that starts two ranks on a host."""
    options = ["--nnodes=2", f"--node-rank={NAMES.index(host)}", "--nproc-per-node=2",
               f"--master-addr={hosts.address('left')}", f"--master-port={port}"]  # fmt: skip
    return [*hosts.command(host), sys.executable, "-m", "torch.distributed.run", *options, *arguments]


def start(command: Sequence[str], cache: str, folder: Path, name: str, **environment: str) -> subprocess.Popen[bytes]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    own |= {"REGATTA_CACHE": cache, **environment}
    with (folder / name).open("wb") as output:
        return subprocess.Popen(command, cwd=folder, env=own, stdout=output, stderr=subprocess.STDOUT)


def plain(hosts: TwoHosts, cache: str, folder: Path, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Two ranks, one on each host, by a launcher that has no store and ends nobody."""
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29501",
                 "MASTER_ADDR": hosts.address("left")}  # fmt: skip
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return [
        start([*hosts.command(host), *command], cache, folder, host, **variables, RANK=str(rank))
        for rank, host in enumerate(NAMES)
    ]


def ended(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The exit codes of all, which end within the limit."""
    try:
        return [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[] if name == "ddp" else pytest.mark.soak) for name in ENGINES]
)
def test_torchrun_on_two_hosts(
    engine: str, hosts: TwoHosts, cache: str, commands: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = [*TINY, "steps=3"]
    arguments = [str(ROOT / "run.py"), *ENGINES[engine], *typed, f"out={tmp_path / 'run'}"]
    both = [start(torchrun(hosts, host, 29500, arguments), cache, tmp_path, host) for host in NAMES]
    codes, said = ended(both), [(tmp_path / host).read_text() for host in NAMES]
    assert codes == [0, 0], said
    assert said[0].count("predicted:") == 1 and f"{engine} mlp: ok" in said[0]
    assert "predicted" not in said[1] and "loss" not in said[1], "only rank 0 prints"
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "ok" and record["plan"]["mesh"]["data"] * record["plan"]["mesh"]["pipeline"] == 4
    monkeypatch.setenv("REGATTA_CACHE", cache)
    assert run.main(["engine=single", *typed, f"out={tmp_path / 'single'}"], {}) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "single"), rel=1e-9)
    assert not {path.name for path in (tmp_path / "run").iterdir()} & {RENDEZVOUS, "error.json", "result.json"}
    assert hosts.processes() == []


def test_a_rank_that_is_killed_ends_all_and_is_named(
    hosts: TwoHosts, cache: str, commands: None, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    both = plain(hosts, cache, tmp_path, ["engine=ddp", *TINY, "steps=100000", f"out={folder}"])
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / "metrics.jsonl").exists():
            assert time.monotonic() < deadline and both[0].poll() is None, (tmp_path / "left").read_text()
            time.sleep(0.1)
        os.kill(children(both[1].pid)[0], signal.SIGKILL)
    finally:
        codes = ended(both)
    record = json.loads((folder / "record.json").read_text())
    assert record["status"] == "error" and "rank 1, stage 0, on right was killed (signal 9)" in record["reason"]
    assert codes == [1, 1] and "launch: error: right: task 1: Killed" in (tmp_path / "right").read_text()
    assert hosts.processes() == []


def children(pid: int) -> list[int]:
    """The processes that another one has forked."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.usefixtures("at_length")
def test_what_rank_0_refuses_ends_the_others(hosts: TwoHosts, cache: str, commands: None, tmp_path: Path) -> None:
    both = plain(hosts, cache, tmp_path, ["engine=ddp", *TINY, "mode=race"])
    assert ended(both) == [2, 0]
    assert "mode race" in (tmp_path / "left").read_text() and (tmp_path / "right").read_text() == ""


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[] if name == "ddp" else pytest.mark.soak) for name in ENGINES]
)
def test_over_launch_ssh(
    engine: str, hosts: TwoHosts, cache: str, commands: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent is on a third host, and reaches both by the first one's ssh."""
    monkeypatch.setenv("REGATTA_CACHE", cache)
    network = f"launch.interface={INTERFACE}"
    with hosts.sshd(tmp_path) as ssh:
        keys = [*over(hosts, ssh, 2), network, "steps=3", f"out={tmp_path / 'run'}"]
        assert run.main([*ENGINES[engine], *TINY, *keys], {}) == 0
    assert run.main(["engine=single", *TINY, "steps=3", f"out={tmp_path / 'single'}"], {}) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "single"), rel=1e-9)
    assert f"{hosts.address('left')}: " in (tmp_path / "run" / "log").read_text()
    assert not {path.name for path in (tmp_path / "run").iterdir()} & {RENDEZVOUS, "error.json", "result.json"}
    assert hosts.processes() == []


def test_a_rank_over_ssh_that_is_killed_ends_all_and_is_named(
    hosts: TwoHosts, cache: str, commands: None, tmp_path: Path
) -> None:
    with over_ssh(hosts, cache, tmp_path) as parent:
        there = [pid for pid in hosts.processes("right") if b"train" in words(pid)]
        os.kill(max(there), signal.SIGKILL)
        assert ended([parent]) == [1]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    who = f"rank 1, stage 0, on {hosts.address('right')} was killed (signal 9)"
    assert record["status"] == "error" and who in record["reason"]
    assert hosts.processes() == []


def test_a_connection_that_is_lost_ends_all_and_is_named(
    hosts: TwoHosts, cache: str, commands: None, tmp_path: Path
) -> None:
    with over_ssh(hosts, cache, tmp_path) as parent:
        for pid in hosts.processes("right"):
            if words(pid).startswith(b"sshd: root"):
                os.kill(pid, signal.SIGKILL)
        assert ended([parent]) == [1]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    who = f"{hosts.address('right')}: was lost, launch.ssh ended with exit code 255"
    assert record["status"] == "error" and who in record["reason"]
    assert hosts.processes() == []


def test_no_rank_outlives_a_parent_that_is_killed(hosts: TwoHosts, cache: str, commands: None, tmp_path: Path) -> None:
    with over_ssh(hosts, cache, tmp_path) as parent:
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 20
        while any(b"harness" in words(pid) for pid in hosts.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [words(pid) for pid in hosts.processes() if b"harness" in words(pid)]


@pytest.mark.usefixtures("at_length")
def test_a_host_that_does_not_know_the_key_is_named(
    hosts: TwoHosts, cache: str, commands: None, tmp_path: Path
) -> None:
    with hosts.sshd(tmp_path) as ssh:
        (tmp_path / "user.pub").write_text((tmp_path / "host.pub").read_text())
        arguments = ["engine=ddp", *TINY, "steps=1", *over(hosts, ssh, 1), f"out={tmp_path / 'run'}"]
        assert ended([start([sys.executable, str(ROOT / "run.py"), *arguments], cache, tmp_path, "said")]) == [1]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert "was not reached, launch.ssh ended with exit code 255: " in record["reason"]
    assert "Permission denied" in record["reason"] and hosts.processes() == []


def over(hosts: TwoHosts, ssh: str, each: int) -> list[str]:
    """The keys for so many ranks on each host."""
    listed = ",".join(f"{hosts.address(host)}:{each}" for host in NAMES)
    return [f"launch.hosts=[{listed}]", f"launch.ssh={ssh}"]


@contextmanager
def over_ssh(hosts: TwoHosts, cache: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Within it a rank on each host trains for long. Yields the parent, which is ended with it."""
    with hosts.sshd(folder) as ssh:
        arguments = ["engine=ddp", *TINY, "steps=100000", *over(hosts, ssh, 1), f"out={folder / 'run'}"]
        parent = start([sys.executable, str(ROOT / "run.py"), *arguments], cache, folder, "said")
        try:
            deadline = time.monotonic() + LIMIT_S
            while not (folder / "run" / "metrics.jsonl").exists():
                assert time.monotonic() < deadline and parent.poll() is None, (folder / "said").read_text()
                time.sleep(0.1)
            yield parent
        finally:
            parent.kill()
            parent.wait()


def words(pid: int) -> bytes:
    """The command line of a process; nothing of one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.usefixtures("at_length")
def test_nothing_is_left_of_the_hosts_where_a_test_fails(commands: None) -> None:
    with pytest.raises(ValueError, match="no luck"), two_hosts() as own:
        sleeping = subprocess.Popen([*own.command("left"), "sleep", "60"])
        deadline = time.monotonic() + 10
        while not own.processes() and time.monotonic() < deadline:  # it is on its way there
            time.sleep(0.02)
        raise ValueError("no luck")
    assert sleeping.wait(10) == -signal.SIGKILL
    assert not [
        line for line in subprocess.check_output(["ip", "netns"], text=True).split() if own.namespace("") in line
    ]
