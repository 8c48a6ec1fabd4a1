"""tune.verify: which choices can race on this machine, and what the first one lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.problem import CannotRun
from harness.planning.tune.result import Best
from harness.races import tuned
from harness.races.entries import Entry
from harness.races.result import Result
from harness.races.verdict import Place, Ratio
from harness.sweep.points import Point
from harness.sweep.row import Row

DDP = Best("ddp", 1, 2, 1, 4, 2, "never", 1.0, 16.0, None, None, 10, 100,
           ("mode=simulate", "engine=ddp", "model=mlp", "cluster=flat", "cluster.devices=2", "tracker=none",
            "mesh.data=2", "batch.micro_batches=2"))  # fmt: skip


def entry(name: str, step_s: float) -> Entry:
    return Entry(name, Row(Point.of([f"seed={len(name)}"])), rounds_s=[step_s] * 7)


def test_a_described_cluster_is_replaced_by_this_machine() -> None:
    own = ["engine=ddp", "model=mlp", "tracker=none", "mesh.data=2", "batch.micro_batches=2"]
    assert tuned._of_this_machine(DDP.overrides) == own
    local = ("engine=ddp", "cluster.devices=2", "tune.verify=3", "race.minutes=1")
    assert tuned._of_this_machine(local) == ["engine=ddp", "cluster.devices=2"]


def test_what_needs_more_devices_is_named_and_not_raced(tmp_path: Path) -> None:
    many = replace(DDP, overrides=(*DDP.overrides[:-2], "mesh.data=64", "batch.size=64", "batch.micro_batches=1"))
    lines: list[str] = []
    assert tuned.verified([many, many], tmp_path / "run", [], lines.append) == 0
    assert lines[1].startswith("1 ddp cannot run here: mesh.data 64 needs 64 devices")
    assert lines[-1] == "nothing to race: 0 of 2 can run on this machine"


def test_what_the_first_choice_lost_and_the_command_of_the_fastest(tmp_path: Path) -> None:
    one, two = entry("1 ddp", 0.3), entry("2 fsdp", 0.2)
    ratios = {"1 ddp": Ratio(1, 1, 1), "2 fsdp": Ratio(1.5, 1.4, 1.6)}
    result = Result([one, two], tmp_path, 1.0, [one, two], ratios, {"1 ddp": Place(2), "2 fsdp": Place(1)})
    said, _, command = tuned._lost(result, {1: DDP, 2: replace(DDP, scheme="fsdp")})
    assert "the first choice, 1 ddp, takes 1.50 times the step time of the fastest, 2 fsdp" in said
    assert command == "python run.py engine=ddp model=mlp tracker=none mesh.data=2 batch.micro_batches=2"


@pytest.mark.parametrize("given", ["1", "-1", "x"])
def test_numbers_that_are_no_race_are_refused(given: str) -> None:
    with pytest.raises(CannotRun, match=r"tune\.verify"):
        tuned._verified([f"tune.verify={given}"])


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (Place(2), "verified: the first choice, 1 ddp, is the fastest of 2"),
        (Place(1), "2 fsdp may be as fast: the difference may be noise"),
        (Place(1, resolved=False), "2 fsdp may be as fast: not resolved"),
    ],
)
def test_what_shares_the_first_rank_is_said(second: Place, said: str, tmp_path: Path) -> None:
    both = [entry("1 ddp", 0.2), entry("2 fsdp", 0.21)]
    ratios = {"1 ddp": Ratio(1, 1, 1), "2 fsdp": Ratio(0.95, 0.8, 1.1)}
    result = Result(both, tmp_path, 1.0, both, ratios, {"1 ddp": Place(1), "2 fsdp": second})
    assert said in next(tuned._lost(result, {1: DDP, 2: DDP}))
