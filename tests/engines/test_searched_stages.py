"""Stages and order searched together, through the front door: what trains has the stages that were found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import run
from harness.core.plan import Plan
from harness.core.record import RunRecord
from harness.core.run_files import METRICS, PLAN, RECORD
from tests.support import known_machine

SETTINGS = ["model=mlp", "model.widths=[64,512,512,512,512,512,10]", "precision=fp64", "batch.size=16", "warmup=1",
            "batch.micro_batches=4", "tracker=none"]  # fmt: skip
SEARCHED = ["engine=pipeline", "engine.schedule=search", "engine.placement=one", "cluster.devices=2",
            "planner=given", "planner.balance=[1,10]"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cache(fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with known_machine.known(tmp_path_factory):
        yield


def train(folder: Path, steps: int, *typed: str) -> tuple[RunRecord, list[float]]:
    assert run.main([*typed, *SETTINGS, f"steps={steps}", f"out={folder}"], {}) == 0
    losses = [json.loads(line)["loss"] for line in (folder / METRICS).read_text().splitlines()]
    return RunRecord.load(folder / RECORD), losses


def test_searched_stages_train_like_single_and_go_on(tmp_path: Path, commands: None) -> None:
    """One layer of eleven in the first stage is what the planner is asked for; a second start has the same stages."""
    _, expected = train(tmp_path / "single", 4, "engine=single")
    record, losses = train(tmp_path / "run", 2, *SEARCHED, "engine.boundaries=search")
    plan = Plan.load(tmp_path / "run" / PLAN)
    assert plan.balance != (1, 10) and sum(plan.balance) == 11
    assert record.predicted["planner_balance"] == [1, 10]
    assert record.predicted["step_time_s"] < record.predicted["planner_step_s"]
    assert losses == pytest.approx(expected[: len(losses)], rel=1e-12)
    again, further = train(tmp_path / "run", 4, *SEARCHED, "engine.boundaries=search")
    assert Plan.load(tmp_path / "run" / PLAN).stages == plan.stages
    assert Plan.load(tmp_path / "run" / PLAN).order == plan.order
    assert again.predicted["planner_balance"] == [1, 10]
    assert further == pytest.approx(expected, rel=1e-12)
