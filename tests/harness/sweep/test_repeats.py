"""`repeats=3`: three seeds for each point of a sweep, and one row for them."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.sweep import repeats
from harness.sweep.points import Point, expand
from harness.sweep.repeats import Summary
from harness.sweep.row import Row


def row(engine: str, seed: int, throughput: float, status: str = "ok") -> Row:
    config = {"mode": "run", "engine": {"name": engine}, "model": {"name": "mlp"}, "batch": {"size": 8}}
    record = RunRecord("x", status, config=config, metrics={"throughput": throughput})  # type: ignore[arg-type]
    return Row(Point.of([f"engine={engine}", f"seed={seed}"]), record=record)


def test_each_point_has_three_seeds() -> None:
    points = expand(["engine=single,ddp", "repeats=3", "model=mlp"])
    assert [(one.values()["engine"], one.values()["seed"]) for one in points] == [
        (engine, seed) for engine in ("single", "ddp") for seed in ("0", "1", "2")
    ]
    assert expand(["repeats=2", "seed=7", "engine=gpipe"]) == expand(["engine=gpipe", "seed=7,8"])
    assert len(expand(["engine=all", "repeats=2"])) == 2 * len(expand(["engine=all"]))


@pytest.mark.parametrize("text", ["repeats=0", "repeats=x", "repeats=-1", "repeats=1.5", "repeats=1,2", "repeats=5000"])
def test_what_is_no_number_of_seeds(text: str) -> None:
    with pytest.raises(CannotRun, match="repeats"):
        expand(["engine=gpipe", text])


@pytest.mark.parametrize("seed", ["seed=1,2", "seed=x"])
def test_seeds_follow_from_the_first_one(seed: str) -> None:
    with pytest.raises(CannotRun, match="seed"):
        expand(["engine=gpipe", "repeats=2", seed])


def test_the_mean_of_upper_bounds_is_one() -> None:
    rows = [row("ddp", seed, 10.0) for seed in range(2)]
    for one in rows:
        assert one.record
        basis = {"simulation": {"upper_bound": True}}
        one.record = replace(one.record, source="simulated", manifest=basis)
    columns = {column.name: column.cells for column in repeats.columns(repeats.groups(rows))}
    (speed,) = columns["samples/s"]
    assert speed.startswith("<=10")


def test_a_row_has_the_mean_and_the_spread() -> None:
    speeds = {"single": (10.0, 12.0, 11.0), "ddp": (20.0, 22.0, 30.0)}
    rows = [row(engine, seed, speed) for engine, own in speeds.items() for seed, speed in enumerate(own)]
    columns = {column.name: column.cells for column in repeats.columns(repeats.groups(rows))}
    assert columns["engine"] == ["single", "ddp"] and columns["ok"] == ["3 of 3", "3 of 3"]
    mean, spread = statistics.fmean(speeds["ddp"]), statistics.stdev(speeds["ddp"])
    assert columns["samples/s"] == ["11 \N{PLUS-MINUS SIGN} 1  ", f"{mean:g} \N{PLUS-MINUS SIGN} {spread:.3f} *"]
    assert "seed" not in columns and "loss" not in columns


def test_each_row_can_have_seeds_of_its_own() -> None:
    """As in a list of points."""
    rows = [row(engine, seed, 1.0 + seed) for seed, engine in enumerate(["single", "ddp"] * 2)]
    columns = {column.name: column.cells for column in repeats.columns(repeats.groups(rows))}
    assert columns["engine"] == ["single", "ddp"] and columns["ok"] == ["2 of 2", "2 of 2"]
    assert "seed" not in columns


def test_points_that_are_not_ok_count_in_no_mean() -> None:
    rows = [row("single", 0, 10.0), row("single", 1, 99.0, "oom")]
    columns = {column.name: column.cells for column in repeats.columns(repeats.groups(rows))}
    assert columns["ok"] == ["1 of 2"] and columns["samples/s"] == ["10"]


def test_points_of_one_seed_are_no_group() -> None:
    assert repeats.groups([row("single", 0, 1.0), row("ddp", 0, 2.0)]) == []
    assert Summary.of([3.0]) == Summary(3.0, 0.0)
