"""A record whose inner fields are broken is skipped by name, and says which field."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from analysis import records
from harness.config import record_shape
from harness.config.registry import ROOT

ARCHIVES = ROOT / "analysis" / "results" / "records"


def document(archive: str) -> dict[str, Any]:
    with gzip.open(ARCHIVES / f"{archive}.jsonl.gz") as lines:
        found: dict[str, Any] = next(one for one in map(json.loads, lines) if one["status"] == "ok")
    return found


@pytest.mark.parametrize(
    ("archive", "field", "value"),
    [
        ("torchgpipe_table2-local", "manifest.overrides", None),
        ("torchgpipe_table2-local", "manifest.overrides", [None]),
        ("torchgpipe_table2-local", "config.model.size", [None]),
        ("torchgpipe_table2-local", "config.engine", "gpipe"),
        ("torchgpipe_table2-local", "config.mode", None),
        ("torchgpipe_table2-local", "config.batch", 3),
        ("torchgpipe_table2-local", "metrics.step_time_s", "<b>"),
        ("torchgpipe_table2-local", "metrics.peak_memory_bytes", [None]),
        ("torchgpipe_table2-local", "metrics.predicted_over_measured", None),
        ("torchgpipe_table2-local", "metrics.predicted_over_measured", [1]),
        ("torchgpipe_table2-local", "plan.mesh", {"data": 0}),
        ("torchgpipe_table2-local", "plan.mesh", {"date": 1}),
        ("madpipe_fig8", "predicted.period_s", None),
        ("autoddl_table2", "metrics.r2", {"plain": []}),
    ],
)
def test_a_broken_field_is_named(tmp_path: Path, archive: str, field: str, value: Any) -> None:
    good = document(archive)
    bad = copy.deepcopy(good) | {"id": "bad"}
    *path, last = field.split(".")
    place = bad
    for name in path:
        place = place[name]
    place[last] = value
    for name, one in (("good", good), ("bad", bad)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps(one), encoding="utf-8")
    loaded = records.load([tmp_path], record_shape.check_complete)
    assert [record.id for record in loaded.records] == [good["id"]]
    (skipped,) = loaded.skipped
    assert skipped.place == str(tmp_path / "bad") and field in skipped.why


@pytest.mark.parametrize(("value", "whole"), [(None, True), ([3, 1], True), ([], True), (["x"], False), (3, False)])
def test_a_list_that_may_be_null(tmp_path: Path, value: Any, whole: bool) -> None:
    one = document("torchgpipe_table2-local")
    one["config"]["engine"] = {"name": "delayed", "in_flight": value}
    (tmp_path / "record.json").write_text(json.dumps(one), encoding="utf-8")
    assert bool(records.load([tmp_path], record_shape.check_complete).records) == whole


def test_the_committed_records_are_whole() -> None:
    """But for those of MadPipe, thousands of plans, of which the smallest archive stands for the others."""
    archives = [
        path for path in ARCHIVES.glob("*.jsonl.gz") if not path.name.startswith(("madpipe_fig6", "madpipe_fig7"))
    ]
    assert not records.load(sorted(archives), record_shape.check_complete).skipped
