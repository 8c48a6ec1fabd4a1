"""A second command on the folder of a run that is training: any one, at any moment."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config import registry
from harness.core.record import RunRecord
from harness.core.run_files import LOCK, METRICS, RECORD
from harness.run import checkpoint_files

FIRST = {
    "single": ["engine=single"],
    "gpipe": ["engine=gpipe", "mesh.pipeline=2"],
    "ddp": ["engine=ddp", "mesh.data=2"],
    "myelin": ["engine=myelin", "mesh.pipeline=2"],
    "torch_pipelining": ["engine=torch_pipelining", "mesh.pipeline=2"],
    "deepspeed": ["engine=deepspeed", "mesh.data=2"],
    "sbp": ["engine=sbp", "mesh.tensor=2", "planner=autoddl"],
    "single, adam": ["engine=single", "optimizer.name=adam", "optimizer.lr=0.001"],
}
ONE_DEVICE = ["mesh.pipeline=1", "mesh.data=1", "mesh.tensor=1"]
"""Instead of the mesh of the first command, which not every entry of a race can have."""
SECOND = {
    "same keys": [],
    "other keys": ["seed=1"],
    "another engine": ["engine=torch_pipelining", "mesh.pipeline=2", "mesh.data=1"],
    "plan": ["mode=plan"],
    "simulate": ["mode=simulate"],
    "tune": ["mode=tune"],
    "profile": ["mode=profile"],
    "fewer steps": ["steps=3"],
    "more steps": ["steps=200000"],
    "overwrite": ["overwrite=true"],
    "sweep": ["-m", "seed=1,2"],
    "race": ["mode=race", "engine=single,gpipe", "steps=5", "planner=balance", *ONE_DEVICE],
    "tune of several": ["mode=tune", "engine=single,ddp"],
    "overwrite other keys": ["overwrite=true", "seed=2"],
}
COMMON = ["model=mlp", "batch.size=16", "batch.micro_batches=4", "warmup=1", "tracker=none", "cluster.device=cpu",
          "cluster.devices=2", "launch.checkpoint_every=50", "steps=100000"]  # fmt: skip
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Pair:
    """A first command, and second ones with the number of steps that the first has done when they start; -1: it has
    just taken the lock."""

    first: str
    seconds: tuple[tuple[str, int], ...]


def random_pairs(count: int, seed: int) -> list[Pair]:
    """Of all first and second commands and moments."""
    rng = random.Random(seed)
    moments = [-1, 0, 1, *(rng.randrange(2, 600) for _ in range(6))]
    return [Pair(rng.choice(list(FIRST)), ((rng.choice(list(SECOND)), rng.choice(moments)),)) for _ in range(count)]


def command(folder: Path, first: str, *more: str) -> list[str]:
    """The same key counts where it comes last."""
    typed = [*COMMON, *FIRST[first], *more, f"out={folder}"]
    keys = {text.partition("=")[0]: text for text in typed}
    return [sys.executable, str(registry.ROOT / "run.py"), *keys.values()]


def check(pair: Pair, folder: Path) -> list[float]:
    """Have the second commands refused while the first one trains, then stop that; returns its losses.

    It must not notice them: its record, lines and checkpoints are those of a run alone.
    """
    folder.mkdir()
    output = folder.parent / f"{folder.name}.txt"
    with output.open("w") as printed:
        first = subprocess.Popen(command(folder, pair.first), stdout=printed, stderr=subprocess.STDOUT)
    try:
        known = None
        for name, steps in sorted(pair.seconds, key=lambda second: second[1]):
            _wait(folder, steps, first)
            before = _record_id(folder)
            assert known in (None, before)
            known = before
            _refused(folder, pair.first, name)
            assert first.poll() is None, output.read_text()
            assert known in (None, _record_id(folder))
        _wait(folder, max(60, lines(folder) + 5), first)
        first.send_signal(signal.SIGTERM)
        first.wait(PATIENCE_S)
    finally:
        first.kill()
        first.wait()
    record = RunRecord.load(folder / RECORD)
    assert record.status == "preempted" and known in (None, record.id), output.read_text()
    found = losses(folder)
    newest, *older = checkpoint_files.steps(folder)
    assert newest == len(found) and older == [(newest - 1) // 50 * 50], "the last two"
    for step in (newest, *older):
        state = checkpoint_files.read(folder, step)
        assert state.id == record.id and [json.loads(line)["loss"] for line in state.lines] == found[:step]
    assert not (folder / "refused.json").exists() and not (folder / ".new").exists()
    return found


def _refused(folder: Path, first: str, second: str) -> None:
    done = subprocess.run(command(folder, first, *SECOND[second]), capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "in use by process" in done.stderr and "Traceback" not in done.stderr


def _wait(folder: Path, steps: int, first: subprocess.Popen[bytes]) -> None:
    """Until the first command has done so many steps."""
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / LOCK).exists() or lines(folder) < steps:
        assert first.poll() is None and time.monotonic() < deadline, "the first one does not train"
        time.sleep(0.01)


def lines(folder: Path) -> int:
    """How many steps are done."""
    try:
        return (folder / METRICS).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def losses(folder: Path) -> list[float]:
    """Of all steps, each once."""
    found = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert [line["step"] for line in found] == [*range(len(found))]
    return [line["loss"] for line in found]


def _record_id(folder: Path) -> str | None:
    try:
        record = RunRecord.load(folder / RECORD)
    except FileNotFoundError:
        return None
    assert record.status == "running"
    return record.id


def agree(many: Sequence[list[float]]) -> bool:
    """Whether runs of the same command have the same losses, as far as they go."""
    return all(a == b for first in many for a, b in zip(first, many[0], strict=False))
