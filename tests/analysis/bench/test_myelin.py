"""What the benchmark of Myelin measures, in few rounds of a tiny network."""

from __future__ import annotations

import pytest

from analysis.bench import myelin
from tests.analysis.bench.conftest import HERE

pytestmark = pytest.mark.usefixtures("ranks")


@pytest.mark.usefixtures("at_length")
def test_every_entry_has_a_row_and_so_has_every_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(myelin, "MODELS", {"MLP": ("model=mlp", "batch.size=8")})
    monkeypatch.setattr(myelin.benchmark_machine, "whole", lambda: HERE)
    names = ("single", "gpipe", "myelin", myelin.ONE)
    monkeypatch.setattr(myelin, "ENTRIES", {name: myelin.ENTRIES[name] for name in names})
    rows = {row["entry"]: row for row in myelin.messages(2)}
    assert list(rows) == [
        *names, myelin.BOTH,
        *(f"myelin, 2 ranks, {m} micro-batches" for m in myelin.MICRO_BATCHES),
        "myelin, 4 ranks, 8 micro-batches", "median absolute error, 2 ranks",
    ]  # fmt: skip
    assert (
        rows["single"]["speed / single"]
        == rows["gpipe"]["speed / gpipe"]
        == rows[myelin.ONE]["speed / myelin, one rank"]
        == 1.0
    )
    two = [rows[f"myelin, 2 ranks, {m} micro-batches"] for m in myelin.MICRO_BATCHES]
    for row in two:
        assert row["predicted / measured"] == row["predicted"] / row["step"] > 0
    errors = sorted(abs(row["predicted / measured"] - 1) for row in two)
    assert rows["median absolute error, 2 ranks"]["error of time"] == errors[1]
