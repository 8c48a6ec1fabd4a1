"""What a sweep prints below its table."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from harness.core.record import RunRecord
from harness.sweep import closing
from harness.sweep.points import Point
from harness.sweep.row import Row
from tests.harness.report.test_run_notes import ran


def test_an_engine_whose_devices_wait_for_each_other_is_named_once() -> None:
    records = [ran("gpipe"), ran("gpipe"), ran("ddp"), ran("torchgpipe", slowed=2.0), ran("periodic", status="oom")]
    (text,) = closing._sharing_a_lock(records)
    assert text.startswith("note: gpipe: computing took 3.0 times as long as predicted") and "engine=pipeline" in text


def test_a_table_of_very_many_points_shows_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest, and then those that have ended: a sweep that is interrupted ends soon."""
    monkeypatch.setattr(closing, "MOST_ROWS", 3)
    rows = [Row(Point.of([f"steps={number}"])) for number in range(1, 9)]
    rows[2].record = RunRecord("x", "oom", reason="why")
    rows[4].record = RunRecord("x", "ok", metrics={"throughput": 2.0})
    rows[6].record = RunRecord("x", "oom", reason="why")
    rows[7].record = RunRecord("x", "ok", metrics={"throughput": 3.0})
    output = io.StringIO()
    closing.close(rows, tmp_path, Console(file=output, width=100))
    text = output.getvalue()
    assert [row.point.id in text for row in rows] == [False, False, True, False, True, False, True, True]
    assert "5 further points are not shown" in text and "8 points: 2 ok, 4 not run, 2 oom" in text
    assert text.count(rows[7].point.id) == 1 and "*" in text
    monkeypatch.setattr(closing, "MOST_ROWS", 1)
    output = io.StringIO()
    closing.close(rows, tmp_path, Console(file=output, width=100))
    assert output.getvalue().count("oom\n  why") == 1 and "1 further points have failed" in output.getvalue()
