"""The path from run.py to a training step is short: at most 9 functions of this project, each with its own name."""

from __future__ import annotations

import json
import subprocess
import traceback
from pathlib import Path
from typing import Any

import pytest

import run
from harness.core.cluster import Device, Link
from harness.host import devices, machine
from harness.host.machine import Machine
from harness.launch import fork_server

pytestmark = pytest.mark.usefixtures("commands")

ROOT = Path(__file__).resolve().parents[1]
MOST = 9
TYPED = ["engine=gpipe", "model=mlp", "batch.size=4", "batch.micro_batches=2", "cluster.device=cpu",
         "cluster.devices=2", "tracker=none", "steps=1", "warmup=1"]  # fmt: skip
WORKER = """
import sys, json, traceback
from harness.worker import __main__ as worker, training_loop

train_steps = training_loop.train_steps

def recording(session, *arguments, **named):
    step = session.step
    def recorded(*batch, **how):
        calls = [(frame.filename, frame.name) for frame in traceback.extract_stack()]
        with open(FILE, "w") as file:
            json.dump([*calls, (step.__func__.__code__.co_filename, step.__name__)], file)
        return step(*batch, **how)
    session.step = recorded
    return train_steps(session, *arguments, **named)

training_loop.train_steps = recording
worker.run_action(sys.argv[1:])
"""
"""What stands in for `python -m harness.worker`: the same, and the calls that lead to `session.step` are written."""


def ours(calls: list[Any]) -> list[str]:
    """The functions of this project, by name."""
    folders = ("harness", "engines")
    inside = [name for file, name in calls if file == str(ROOT / "run.py") or _top(file) in folders]
    return [name for name in inside if name != "<module>"]


def _top(file: str) -> str:
    path = Path(file)
    return path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else ""


def test_from_run_py_to_a_step_there_are_few_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    device = Device(devices.cpu_model(), 10**10, {"float32": 1e12}, 1e10, kernel_s=1e-6)
    machine.store(Machine(device, Link(1e-5, 1e-9), None, 1.8, 1.8))
    code = WORKER.replace("FILE", repr(str(tmp_path / "calls.json")))
    start, parent = subprocess.Popen, []

    def popen(command: list[str], *arguments: Any, **named: Any) -> Any:
        if "train" in command:
            parent.extend((frame.filename, frame.name) for frame in traceback.extract_stack())
            place = command.index("-m")
            command = [*command[:place], "-c", code, *command[place + 2 :]]
        return start(command, *arguments, **named)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)
    monkeypatch.setattr(fork_server, "start", lambda *_: None)  # the one that trains is started by itself
    assert run.main([*TYPED, f"out={tmp_path / 'run'}"], {}) == 0
    worker = json.loads((tmp_path / "calls.json").read_text())
    path = [*ours(parent), *ours(worker)]
    assert path[0] == "main" and path[-1] == "step"
    assert ours(worker)[-2] == "train_steps", "the loop calls the step itself"
    assert len(path) <= MOST, " ".join(path)
    assert len(set(path)) == len(path), path
    assert not {"work", "go", "of"} & set(path), path
