"""What a sweep prints below its table."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from harness.cli.compose import compose
from harness.core.record import RunRecord, Status
from harness.sweep import closing
from harness.sweep.points import Point
from harness.sweep.row import Row
from tests.harness.planning.tune.nets import FLAT, tuned
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


def searched(folder: Path, engine: str, status: Status | None, found: bool = True) -> Row:
    """A search over one engine; without a status it has not begun."""
    typed = [f"engine={engine}", "batch.size=64", "batch.micro_batches=8"]
    row = Row(Point.of(["mode=tune", *FLAT, *typed]))
    if status:
        config: Any = OmegaConf.to_container(compose(row.point.overrides))
        metrics = tuned(folder, *typed).metrics() if found else {}
        row.record = RunRecord(engine, status, "simulated", reason="a reason", config=config, metrics=metrics)
    return row


def printed(rows: list[Row]) -> list[str]:
    console = Console(file=io.StringIO(), width=160)
    closing.close(rows, Path("runs/tuned"), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.usefixtures("computation")
def test_an_interrupted_search_is_one_table_and_a_line_on_what_is_not_finished(tmp_path: Path) -> None:
    rows = [
        searched(tmp_path, "ddp", "ok"),
        searched(tmp_path, "gpipe", "preempted"),
        searched(tmp_path, "myelin", "preempted", found=False),
        searched(tmp_path, "sbp", None),
    ]
    lines = printed(rows)
    assert sum(line.startswith("scheme ") for line in lines) == 1 and not any("a reason" in line for line in lines)
    (line,) = (line for line in lines if "interrupted" in line)
    assert "; searched in part: gpipe; nothing is known of: myelin, sbp   -> " in line and "out=runs/tuned" in line
    assert lines[-1].startswith("python run.py mode=simulate ")
    assert any(line.startswith("4 points: 1 ok, 1 not run, 2 preempted (") for line in lines)


@pytest.mark.usefixtures("computation")
def test_a_search_that_is_finished_has_no_such_line_and_one_that_failed_its_reason(tmp_path: Path) -> None:
    lines = printed([searched(tmp_path, "ddp", "ok"), searched(tmp_path, "sbp", "infeasible", found=False)])
    assert not any("interrupted" in line for line in lines)
    assert sum("a reason" in line for line in lines) == 1
