"""One real run of each engine through the front door, in the fast tier, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config import registry
from harness.core.record import RunRecord
from harness.core.run_files import METRICS, RECORD
from tests.support.faults import ENGINES

STEPS = 3
SETTINGS = ["model=mlp", "batch.size=16", "warmup=1", f"steps={STEPS - 1}", "tracker=none", "cluster.devices=2"]
FURTHER = {"torchgpipe": ("mesh.pipeline=2",), "periodic": ("mesh.pipeline=2", "planner=contiguous")}
MICRO_BATCHES = 4
LATE = {"periodic"}
"""Engines that use older weights (MadPipe): only their first loss is that of `single`."""


def losses(engine: str, folder: Path) -> list[float]:
    overrides = (ENGINES | FURTHER)[engine]
    replicas = 2 if "mesh.data=2" in overrides else 1
    typed = [f"engine={engine}", *overrides, *SETTINGS, f"batch.micro_batches={MICRO_BATCHES // replicas}"]
    done = subprocess.run(
        [sys.executable, str(registry.ROOT / "run.py"), *typed, f"out={folder}"],
        env=os.environ | {"REGATTA_CACHE": str(folder.parent.parent / "cache")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert RunRecord.load(folder / RECORD).status == "ok"
    return [json.loads(line)["loss"] for line in (folder / METRICS).read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses("single", tmp_path_factory.mktemp("single") / "run")


def test_none_is_left_out() -> None:
    assert ENGINES.keys() | FURTHER.keys() == {plugin.name for plugin in registry.scan() if plugin.group == "engine"}


@pytest.mark.fast
@pytest.mark.parametrize("engine", sorted({*ENGINES, *FURTHER} - {"single"}))
def test_it_trains_like_single(engine: str, expected: list[float], tmp_path: Path, commands: None) -> None:
    found = losses(engine, tmp_path / "run")
    assert len(found) == STEPS
    compared = 1 if engine in LATE else STEPS
    assert found[:compared] == pytest.approx(expected[:compared], rel=1e-5)
