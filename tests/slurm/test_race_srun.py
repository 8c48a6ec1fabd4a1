"""A race in a job on two nodes: the ranks of its entries are steps of the job, and take turns as those here do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core.run_files import RACE
from tests.slurm.emulated import Cluster
from tests.slurm.test_ranks_srun import ROOT, TINY, begin

KEYS = [key for key in TINY if not key.startswith("steps=")]


@pytest.mark.usefixtures("commands", "at_length")
def test_entries_on_two_nodes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin(2, 2, monkeypatch)
    command = [sys.executable, str(ROOT / "run.py"), "mode=race", "engine=ddp,fsdp", *KEYS, "steps=3", "out=it"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "it" / RACE).read_text())["entries"]
    assert [(one["name"], one["status"], len(one["rounds_s"])) for one in found] == [
        ("ddp", "ok", 3),
        ("fsdp", "ok", 3),
    ]
    assert "1x4x1" in done.stdout
