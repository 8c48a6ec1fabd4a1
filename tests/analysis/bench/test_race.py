"""The race of all engines: what its rows say of those that finish, and of those that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from analysis.bench import race as bench
from analysis.bench import race_plot

pytestmark = pytest.mark.usefixtures("commands", "at_length")

KEYS = ("model=mlp", "batch.size=8", "batch.micro_batch_size=2", "cluster.device=cpu", "warmup=2")
SCHEMES = {
    "single": ("engine=single",),
    "gpipe": ("engine=gpipe", "engine.checkpoint=never"),
    "replicas": ("engine=ddp",),
    "zbv": ("engine=torch_pipelining", "engine.schedule=zbv", "mesh.pipeline=4"),
}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["entry"]: row for row in bench.race_model("tiny", KEYS, SCHEMES, rounds=3)}


def test_a_row_for_each(rows: dict[str, dict[str, Any]]) -> None:
    assert [*rows] == [*SCHEMES]
    assert "mesh.pipeline 4" in rows["zbv"]["note"] and "step" not in rows["zbv"]
    assert {row["model"] for row in rows.values()} == {"tiny"}
    for name in ("single", "gpipe", "replicas"):
        (low, high), ratio = rows[name]["quartiles"], rows[name]["speed / single"]
        assert 0 < low <= rows[name]["step"] <= high
        assert math.isclose(ratio, rows["single"]["step"] / rows[name]["step"])
        assert rows[name]["interval"][0] <= ratio <= rows[name]["interval"][1]
        assert rows[name]["peak memory"] > 1000
        assert (rows[name]["batch"], rows[name]["micro-batch"]) == (8, 2), "of one size, also of replicas"


def test_the_picture(rows: dict[str, dict[str, Any]]) -> None:
    drawn = race_plot.figure([*rows.values()])
    assert drawn
    upwards = sorted(("single", "gpipe", "replicas"), key=lambda name: rows[name]["speed / single"])
    assert [text.get_text() for text in drawn.axes[0].get_yticklabels()] == upwards
