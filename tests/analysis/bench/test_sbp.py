"""What the sbp engine's benchmarks measure, in few rounds."""

from __future__ import annotations

import pytest

from analysis.bench import sbp
from analysis.bench.entries import prepared, profiled
from tests.analysis.bench.conftest import HERE


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_planned_linear_costs_the_host_little(ranks: int) -> None:
    (row,) = sbp.linear(ranks, 5)
    assert row["entry"] == f"planned Linear, 64 wide, {ranks} rank{'s' * (ranks > 1)}"
    assert 0.2 < row["time / nn.Linear"] < 3


@pytest.mark.usefixtures("commands")
def test_a_wide_mlp_has_a_row_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbp, "WIDE", ("model=mlp", "batch.size=16", "batch.micro_batches=1"))
    monkeypatch.setattr(sbp.benchmark_machine, "whole", lambda: HERE)
    rows = sbp.wide(64, 3)
    assert [row["entry"] for row in rows] == [
        "MLP, 64 wide, single", "MLP, 64 wide, sbp", "MLP, 64 wide, 2 x single at once"
    ]  # fmt: skip
    assert rows[0]["speed / single"] == 1.0
    for row in rows:
        low, high = row["quartiles"]
        assert 0 < low <= row["step"] <= high
    assert rows[1]["of both cores"] > 0
    assert all(len(strategy.split("x")) == 3 for strategy in rows[1]["strategies"].split())


def test_a_device_of_a_tensor_mesh_has_as_many_samples_as_others() -> None:
    """8 samples in 4 micro-batches of 2; on 2 devices in 2 micro-batches of 4, of which each has 2."""
    keys = ("model=mlp", "batch.size=8", "batch.micro_batches=4")
    entry = prepared([*keys, *sbp.SPLIT], profiled(keys), HERE)
    assert (entry.plan.mesh.tensor, entry.plan.micro_batches, entry.profile.micro_batch) == (2, 2, 4)
