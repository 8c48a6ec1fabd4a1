"""`mode=race repeats=3`: a race for each seed, and the mean and the spread over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.core.run_files import RACE, RACE_PICTURE
from harness.races import entries, repeats, result
from harness.races.entries import Entry
from harness.races.result import Result
from harness.sweep.points import Point
from harness.sweep.row import Row


def entry(name: str, times_s: list[float], loss: float) -> Entry:
    config = {"engine": {"name": name}, "model": {"name": "mlp"}, "batch": {"size": 8}}
    record = RunRecord(name, "ok", config=config, metrics={"first_loss": 1.0, "loss": loss})
    return Entry(name, Row(Point.of([f"engine={name}"]), record=record), rounds_s=times_s)


def held(folder: Path, seed: int, gpipe_s: float) -> Result:
    both = [entry("single", [1.0] * 7, 0.5 + seed), entry("gpipe", [gpipe_s] * 7, 0.5 + seed)]
    return result.of(both, folder / f"seed-{seed}", 1.0, 0.5)


def test_a_race_for_each_seed() -> None:
    keys = ["mode=race", "engine=single,ddp", "model=mlp", "ddp:batch.micro_batches=2"]
    assert entries.repeated(keys) == {"": keys}
    assert entries.repeated([*keys, "repeats=2", "seed=3"]) == {
        "seed-3": [*keys, "seed=3"], "seed-4": [*keys, "seed=4"]
    }  # fmt: skip
    with pytest.raises(CannotRun, match="repeats 0"):
        entries.repeated([*keys, "repeats=0"])


def test_the_table_and_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repeats.show([held(tmp_path, 0, 0.5), held(tmp_path, 1, 0.4)], tmp_path, Console(width=120))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    loss = "1.0000 \N{PLUS-MINUS SIGN} 0.7071"
    assert lines[3:5] == [
        f"gpipe 2 of 2 450.0 ms \N{PLUS-MINUS SIGN} 70.7 ms 2.25 \N{PLUS-MINUS SIGN} 0.35 1, 1 {loss}",
        f"single 2 of 2 1.00 s 1.00 2, 2 {loss}",
    ]
    found = json.loads((tmp_path / RACE).read_text())
    assert found["races"] == ["seed-0", "seed-1"]
    assert found["entries"][1] == {
        "name": "gpipe", "step_time_s": [0.5, 0.4], "speed_over_reference": [2.0, 2.5], "rank": [1, 1]
    }  # fmt: skip
    assert (tmp_path / RACE_PICTURE).read_bytes().startswith(b"\x89PNG")


def test_one_that_has_not_finished_in_one_race(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = held(tmp_path, 1, 0.4)
    alone = result.of([second.entered[0], Entry("gpipe", second.entered[1].row)], tmp_path / "seed-1", 1.0, 0.5)
    repeats.show([held(tmp_path, 0, 0.5), alone], tmp_path, Console(width=120))
    assert "gpipe   1 of 2" in capsys.readouterr().out
