"""Calibrations in processes of their own, on a machine that is known already."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.core.cluster import Device, Link
from harness.core.record import RunRecord
from harness.host import devices
from harness.host.machine import Machine
from harness.launch.supervisor import ROOT
from tests.support import processes

MACHINE = Machine(Device(devices.cpu_model(), 10**10, {"float32": 1e12}, 1e10, kernel_s=1e-6), Link(1e-5, 1e-10))
TYPED = ["mode=calibrate", "cluster.device=cpu", "cluster.devices=2"]
NO_TORCH = """
import sys
import run
code = run.main(sys.argv[1:])
sys.exit("torch was imported" if "torch" in sys.modules else code)
"""
SOON_S = 30.0
"""Far longer than any of this takes on a busy machine."""


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def ranks_of(folder: Path) -> list[int]:
    """The processes that were started for a run: the host of the ranks, which comes first, and the ranks."""
    return processes.running("harness.worker", str(folder))


def disturbed(folder: Path, disturb: Callable[[list[int]], Any], *typed: str) -> RunRecord:
    """A calibration whose ranks are disturbed in their second round."""
    (folder / "cluster").mkdir()
    (folder / "cluster" / "calibrated.yaml").write_text("of an earlier one")
    run = python(NO_TORCH, *TYPED, "steps=100000", f"out={folder}", *typed)
    deadline = time.monotonic() + SOON_S
    while "round 2 of" not in read(folder / "log") and time.monotonic() < deadline:
        time.sleep(0.05)
    began = time.monotonic()
    disturb(ranks_of(folder))
    run.communicate(timeout=SOON_S)
    assert time.monotonic() - began < SOON_S
    assert not ranks_of(folder) and not (folder / "cluster" / "calibrated.yaml").exists()
    return RunRecord.load(folder / "record.json")


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
