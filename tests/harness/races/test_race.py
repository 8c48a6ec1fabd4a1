"""Races of real runs: who finishes, who fails, who is refused, and what is left when one is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.config import registry
from harness.core.record import RunRecord
from harness.core.run_files import METRICS, RACE, RACE_PICTURE, RECORD
from tests.harness.user_model import nets
from tests.support import processes

pytestmark = pytest.mark.usefixtures("commands", "fork_server")

RUN = [sys.executable, str(registry.ROOT / "run.py"), "mode=race", "tracker=none", "cluster.device=cpu", "warmup=1"]
FAILS_IN_RANKS = """
import time

import torch.distributed as dist
from torch import nn

from harness import Classifier


class Fails(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += dist.is_initialized()
        if self.calls > 12:
            raise ValueError("no luck")
        return x


def build():
    return Classifier(nn.Sequential(nn.Linear(4, 8), Fails(), nn.Tanh(), nn.Linear(8, 3)), (4,), 3)
"""
"""A model that fails in its third turn where it trains in several processes: 4 calls a turn."""


def race(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *overrides], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a race of four entries, one of which fails and another one is refused; what was printed."""
    folder = tmp_path_factory.mktemp("race")
    nets.write(folder, FAILS_IN_RANKS)
    keys = ("model=net.py:build", "engine=single,ddp,gpipe,myelin", "myelin:mesh.pipeline=7", "batch.micro_batches=2")
    done = race(folder, *keys, "steps=4", "out=it")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "it", done.stdout


def documents(folder: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads((folder / RACE).read_text())["entries"]}


def test_the_others_go_on(held: tuple[Path, str]) -> None:
    folder, said = held
    found = documents(folder)
    assert {name: one["status"] for name, one in found.items()} == {
        "single": "ok", "ddp": "error", "gpipe": "ok", "myelin": "infeasible",
    }  # fmt: skip
    assert len(found["single"]["rounds_s"]) == len(found["gpipe"]["rounds_s"]) == 4 > len(found["ddp"]["rounds_s"]) > 0
    assert found["ddp"]["rank"] is None and found["gpipe"]["rank"]["rank"] in (1, 2)
    assert "ValueError: no luck" in said and "ddp has ended in round" in said and "mesh.pipeline 7" in said
    assert "4 rounds of 2 entries" in said and (folder / RACE_PICTURE).stat().st_size > 1000


def test_entries_are_runs_with_records(held: tuple[Path, str]) -> None:
    folder, _ = held
    one = documents(folder)["gpipe"]
    record = RunRecord.load(folder / one["id"] / RECORD)
    assert record.config["steps"] == 4, "of the race's rounds"
    lines = [json.loads(line) for line in (folder / one["id"] / METRICS).read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["warmup", *4 * ["warmup", "measured"]]
    assert [line["step_time_s"] for line in lines if line["phase"] == "measured"] == one["rounds_s"]


def test_their_losses_are_the_same(held: tuple[Path, str]) -> None:
    """All do as many steps, also those that are not measured."""
    folder, _ = held
    losses = [
        [
            json.loads(line)["loss"]
            for line in (folder / documents(folder)[name]["id"] / METRICS).read_text().splitlines()
        ]
        for name in ("single", "gpipe")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_folder_has_one_race(held: tuple[Path, str]) -> None:
    folder, _ = held
    done = race(folder.parent, "model=net.py:build", "engine=single,gpipe", "out=it")
    assert done.returncode == 2 and "holds something already" in done.stderr and "out=it-2" in done.stderr


def test_ctrl_c_ends_all_and_says_what_is_known(tmp_path: Path) -> None:
    keys = ["model=mlp", "engine=single,gpipe", "steps=1000", "out=it"]
    with subprocess.Popen([*RUN, *keys], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            for line in process.stdout:
                if line.startswith("round"):
                    os.kill(process.pid, signal.SIGINT)
                    break
            said = process.stdout.read()
        finally:
            process.kill()
    assert process.returncode == 130
    found = documents(tmp_path / "it")
    assert [(one["status"], one.get("reason", "")) for one in found.values()] == [("ok", "")] * 2
    assert "rounds of 2 entries" in said


@pytest.mark.usefixtures("at_length")
def test_a_race_for_each_value_of_another_key(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUN, "-m", "model=mlp", "engine=single,gpipe", "batch.size=8,16", "steps=1", "out=it"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([*(tmp_path / "it").glob(f"*/{RACE}")]) == 2


@pytest.mark.usefixtures("at_length")
def test_a_entry_that_is_killed_is_a_row(tmp_path: Path) -> None:
    keys = ["model=mlp", "engine=single,gpipe,ddp", "steps=300", "out=it"]
    with subprocess.Popen([*RUN, *keys], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            for line in process.stdout:
                if line.startswith("ddp is ready"):
                    break
            _kill_command_of("engine=gpipe", tmp_path)
            said = process.stdout.read()
        finally:
            process.kill()
    assert process.returncode == 0, said
    found = documents(tmp_path / "it")
    assert {name: one["status"] for name, one in found.items()} == {"single": "ok", "gpipe": "error", "ddp": "ok"}
    assert "gpipe error" in said and "ended by signal 9" in said


@pytest.mark.usefixtures("at_length")
def test_an_entry_that_hangs_is_a_row(tmp_path: Path) -> None:
    nets.write(tmp_path, FAILS_IN_RANKS.replace('raise ValueError("no luck")', "time.sleep(600)"))
    keys = ("model=net.py:build", "engine=single,ddp,gpipe", "batch.micro_batches=2", "steps=6", "launch.timeout_s=5")
    done = race(tmp_path, *keys, "out=it")
    assert done.returncode == 0, done.stdout + done.stderr
    found = documents(tmp_path / "it")
    assert {name: one["status"] for name, one in found.items()} == {"single": "ok", "ddp": "timeout", "gpipe": "ok"}
    assert "ddp timeout" in done.stdout and "no progress for launch.timeout_s=5 s" in done.stdout


def _kill_command_of(engine: str, folder: Path) -> None:
    """Kill the run.py of an entry; other tests race, too."""
    for pid in processes.running("run.py", engine, "mode=run"):
        if Path(f"/proc/{pid}/cwd").resolve() == folder:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
            return
    raise AssertionError(f"no run of {engine}")
