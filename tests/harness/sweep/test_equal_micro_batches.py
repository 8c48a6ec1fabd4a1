"""Micro-batches of one size in a sweep over engines, unless a key says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from harness.sweep import local, run_point
from harness.sweep.equal_micro_batches import equalized
from harness.sweep.points import Point, expand

TWO = ("model=mlp", "cluster.device=cpu", "cluster.devices=2", "batch.size=16", "tracker=none")


def sizes(overrides: Sequence[str]) -> list[tuple[str, str | None]]:
    points = equalized(expand(overrides), overrides)
    return [(point.values()["engine"], point.values().get("batch.micro_batch_size")) for point in points]


def test_replicas_get_fewer_and_not_smaller_ones() -> None:
    assert sizes([*TWO, "engine=single,gpipe,ddp"]) == [("single", None), ("gpipe", None), ("ddp", "2")]
    assert sizes([*TWO, "engine=ddp,single"]) == [("ddp", None), ("single", "1")]


def test_each_batch_has_a_size_of_its_own() -> None:
    found = [*TWO[:-2], "tracker=none", "engine=single,ddp", "batch.size=16,32"]
    assert sizes(found) == [("single", None), ("single", None), ("ddp", "2"), ("ddp", "4")]


@pytest.mark.parametrize(
    "given", ["batch.micro_batches=4", "batch.micro_batches=2,4", "batch.micro_batch_size=1", "+sweeps=smoke"]
)
def test_what_is_given_stays(given: str) -> None:
    overrides = [*TWO, "engine=single,ddp", given]
    points = expand(overrides)
    assert equalized(points, overrides) == points


@pytest.mark.parametrize(
    "given", ["mode=tune", "engine.zero=9", "batch.micro_batches=3", "mode=profile", "batch.size=0"]
)
def test_points_that_search_or_cannot_run_stay(given: str) -> None:
    points = expand([*TWO, "engine=single,ddp", given])
    assert equalized(points, []) == points


def test_seeds_are_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Point] = []

    def composed(point: Point) -> object:
        looked.append(point)
        return run_point.composed(point)

    overrides = [*TWO, "engine=single,ddp", "repeats=5"]
    points = equalized(expand(overrides), overrides, composed)  # type: ignore[arg-type]
    assert len(points) == 10 and len(looked) == 3, "single, ddp, and ddp with another size"
    assert sum("batch.micro_batch_size=2" in point.overrides for point in points) == 5


def test_a_sweep_here_has_them() -> None:
    rows = local.rows_of([*TWO, "engine=single,fsdp"])
    assert "batch.micro_batch_size=2" in rows[1].point.overrides
