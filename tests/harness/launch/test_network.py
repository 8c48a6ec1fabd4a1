"""launch.interface, launch.timeout_s: which network ranks use, and how long they wait for each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import run
from harness.cli.compose import compose
from harness.config import registry
from harness.launch import network, process_group, rank_starter
from harness.runtime import collectives

TYPED = ["engine=ddp", "model=mlp", "batch.size=4", "batch.micro_batches=1", "cluster.device=cpu", "cluster.devices=2",
         "tracker=none", "steps=1", "warmup=1"]  # fmt: skip


def test_only_interfaces_that_are_there() -> None:
    assert network.problem(None) is network.problem("lo") is None
    wrong = network.problem("ib7")
    assert wrong and wrong.key == "launch.interface" and "ib7" not in wrong.message and "lo" in wrong.message
    assert all(network.problem(str(fix["launch.interface"])) is None for fix in wrong.fixes) and wrong.fixes


def test_gloo_and_nccl_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (network.GLOO, network.NCCL):
        monkeypatch.setenv(name, "as before")
    network.use(None)
    assert os.environ[network.GLOO] == os.environ[network.NCCL] == "as before"
    network.use("lo")
    assert (os.environ[network.GLOO], os.environ[network.NCCL]) == ("lo", "=lo")
    monkeypatch.delenv(network.GLOO)
    network.use("lo")
    network.use_that_of("192.0.2.1")
    assert os.environ[network.GLOO] == "lo", "the user's stays"


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        (["engine=ddp"], True),
        (["engine=gpipe"], False),
        (["engine=ddp", "mode=plan"], False),
        (["engine=ddp", "mode=simulate", "cluster=p40x8"], False),
    ],
)
def test_it_matters_where_ranks_start(typed: list[str], wrong: bool) -> None:
    config = compose(["model=mlp", "launch.interface=ib7", *typed])
    found = rank_starter.problems(config, registry.build("engine", config.engine).capabilities)
    assert [one.key for one in found] == ["launch.interface"] * wrong


def test_ranks_use_it(commands: None, fork_server: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*TYPED, "launch.interface=lo", f"out={tmp_path / 'a'}"], {}) == 0
    assert run.main([*TYPED, "launch.interface=lo9", f"out={tmp_path / 'b'}"], {}) == 2
    said = capsys.readouterr().err
    assert "launch.interface lo9" in said and "is no network interface of" in said


@pytest.fixture
def impatient() -> Iterator[None]:
    yield
    collectives.outlast(None)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("limit_s, hours", [(None, 1), (60.0, 1), (7200.0, 4)])
def test_ranks_wait_for_longer_than_their_parent(
    limit_s: float | None, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")  # as it was, afterwards
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, timeout, **__: given.append(timeout))
    monkeypatch.setattr(collectives.dist, "new_group", lambda _, timeout, pg_options: given.append(timeout))
    collectives.outlast(limit_s)
    process_group.join(0, 1, "cpu", 0)
    collectives.new_group([0])
    assert given == [collectives.patience()] * 2 == [timedelta(hours=hours)] * 2
