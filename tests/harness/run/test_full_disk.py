"""Checkpoints that cannot be written: said at once, with the space, and with what the run could resume from."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config import registry
from harness.core.record import RunRecord
from harness.run.checkpoint_files import place, steps
from tests.support import known_machine
from tests.support.machines import MACHINE

pytestmark = pytest.mark.usefixtures("commands")

TYPED = ["engine=single", "model=mlp", "model.widths=[400,400]", "optimizer.name=adam", "batch.size=16", "warmup=1",
         "batch.micro_batches=4", "cluster.device=cpu", "tracker=none", "launch.checkpoint_every=10"]  # fmt: skip
LIMITED = ["bash", "-c", 'ulimit -f 1000; exec "$@"', "limited"]
"""No file grows beyond 1000 KiB: a checkpoint of 1.8 MiB does not fit, all else does."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with known_machine.known(tmp_path_factory, MACHINE):
        yield


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, str(registry.ROOT / "run.py"), *TYPED, *more, f"out={folder}"]


def notes(output: str) -> list[str]:
    return [line for line in output.splitlines() if "no checkpoint after" in line]


def test_it_is_said_once_for_each_state_and_in_the_record(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LIMITED, *command(tmp_path, "steps=39")], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    first, last = notes(done.stdout)
    assert "after 10 steps" in first and "MiB are needed" in first and "are free" in first
    assert "none to resume from" in first
    record = RunRecord.load(tmp_path / "record.json")
    assert record.status == "ok" and "after 40 steps" in record.reason and record.reason in last
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    errors = {line["step"]: line["checkpoint_error"] for line in lines if "checkpoint_error" in line}
    assert set(errors) == {9, 19, 29, 39}
    assert all(error["needed_bytes"] > 1.8e6 and error["free_bytes"] > 0 for error in errors.values())


@pytest.mark.usefixtures("at_length")
def test_a_stop_that_leaves_no_checkpoint_says_what_there_is(tmp_path: Path) -> None:
    subprocess.run(command(tmp_path, "steps=9"), check=True, capture_output=True)
    assert steps(tmp_path) == [10]
    whole = place(tmp_path, 10).read_bytes()
    process = subprocess.Popen(
        [*LIMITED, *command(tmp_path, "steps=100000")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout
    try:
        said = next(line for line in process.stdout if "no checkpoint after 20 steps" in line)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    finally:
        process.kill()
    assert "could resume after 10 steps" in said
    record = RunRecord.load(tmp_path / "record.json")
    assert record.status == "preempted" and "no checkpoint after" in record.reason
    assert "could resume after 10 steps" in record.reason
    assert steps(tmp_path) == [10] and place(tmp_path, 10).read_bytes() == whole
