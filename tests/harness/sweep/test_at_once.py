"""Searches of a sweep run at the same time where nothing is measured."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from rich.console import Console

from harness.cli.compose import compose
from harness.core.record import RunRecord
from harness.core.run_files import CONSOLE
from harness.host import devices
from harness.run import runner
from harness.run.folder_lock import Busy
from harness.sweep import at_once, local, run_point
from harness.sweep.live_table import Display
from harness.sweep.points import Point
from harness.sweep.row import Row

TUNE = ["mode=tune", "model=mlp", "cluster=gcp_a100", "cluster.nodes=1", "cluster.devices=2"]
ENGINES = ("ddp", "gpipe", "myelin")


@pytest.mark.parametrize(
    ("overrides", "may"),
    [
        (TUNE, True),
        (["mode=simulate", *TUNE[1:]], False),
        (["mode=tune", "model=mlp"], False),
        (["mode=tune", "model=mlp", "cluster=flat"], False),
        (["mode=tune", "model=mlp", "cluster=flat", "costs=analytic"], True),
    ],
    ids=["computed", "no search", "this machine", "no peaks: measured here", "as asked"],
)
def test_what_may_run_next_to_others(overrides: list[str], may: bool) -> None:
    assert at_once.able(compose(overrides)) is may


def rows_and_configs() -> tuple[list[Row], dict[str, DictConfig | None]]:
    rows = [Row(Point.of([*TUNE, f"engine={engine}"])) for engine in ENGINES]
    return rows, {row.point.id: compose(row.point.overrides) for row in rows}


def run(work: Callable[[Row, Callable[[], None]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`at_once.run` on two cores, with `work` in the place of processes; returns its result, and the rows."""

    def run_point_(
        row: Row, folder: Path, config: Any, waiting: Callable[[], None], here: bool, environment: Any, server: str
    ) -> None:
        assert here is False and config is not None and server
        work(row, waiting)
        row.record = RunRecord(row.point.id, "ok")

    monkeypatch.setattr(run_point, "run_point", run_point_)
    monkeypatch.setattr(devices, "cores", lambda: 2)
    rows, configs = rows_and_configs()
    with Display(rows, Console(file=io.StringIO())) as display:
        try:
            return at_once.run(rows, tmp_path, configs, display), rows
        except KeyboardInterrupt as error:
            return error, rows


def test_two_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def work(row: Row, waiting: Callable[[], None]) -> None:
        if row.point.overrides[-1] != "engine=myelin":
            both.wait(20)

    elsewhere, rows = run(work, tmp_path, monkeypatch)
    assert elsewhere == [] and all(row.record for row in rows)


def test_what_another_sweep_runs_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(row: Row, waiting: Callable[[], None]) -> None:
        if row.point.overrides[-1] == "engine=gpipe":
            raise Busy("it is another one's")

    elsewhere, rows = run(work, tmp_path, monkeypatch)
    assert elsewhere == [(rows[1], None)] and rows[1].record is None and rows[1].waits == "elsewhere"
    assert rows[0].record and rows[2].record


def test_an_interrupt_reaches_those_that_run_and_begins_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Row] = []
    asked = threading.Event()

    def work(row: Row, waiting: Callable[[], None]) -> None:
        begun.append(row)
        assert asked.wait(20)
        for _ in range(2000):
            waiting()
            threading.Event().wait(0.01)
        raise AssertionError("nobody has ended it")

    def doing(*_: object) -> None:
        if len(begun) == 2:
            asked.set()
            raise KeyboardInterrupt("Ctrl-C")

    monkeypatch.setattr(Display, "doing", doing)
    error, rows = run(work, tmp_path, monkeypatch)
    assert isinstance(error, KeyboardInterrupt)
    assert len(begun) == 2 and not any(row.record for row in rows)


def test_an_error_reaches_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a full disk, say: those that run are asked to end, and no others begin."""
    begun: list[Row] = []

    def work(row: Row, waiting: Callable[[], None]) -> None:
        begun.append(row)
        if len(begun) == 1:
            raise OSError("no space left")
        for _ in range(2000):
            waiting()
            threading.Event().wait(0.01)
        raise AssertionError("nobody has ended it")

    with pytest.raises(OSError, match="no space left"):
        run(work, tmp_path, monkeypatch)
    assert len(begun) <= 2


def test_processes_are_forked_from_that_of_the_sweep(
    commands: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they need not be started, and read no configuration; their records have the command that does the same."""
    monkeypatch.setattr(devices, "cores", lambda: 2)
    monkeypatch.setattr(runner, "run", _known_here)
    monkeypatch.setattr(subprocess.Popen, "__init__", _none_is_started)
    rows, configs = rows_and_configs()
    with Display(rows, Console(file=io.StringIO())) as display:
        assert at_once.run(rows, tmp_path, configs, display) == []
    for row in rows:
        folder = tmp_path / row.point.id
        said = (folder / CONSOLE).read_text().split(" ")
        assert said[:2] == [str(folder), "1"] and said[2].endswith("run.py")
        assert said[3:] == [*row.point.overrides, f"out={folder}\n"]
        assert row.record and row.record.status == "error" and "exit code 3" in row.record.reason


def _none_is_started(*_: object, **__: object) -> None:
    raise AssertionError("a process is started")


def _known_here(config: DictConfig, overrides: Sequence[str]) -> RunRecord:
    print(config.out, os.environ["OMP_NUM_THREADS"], *sys.argv, flush=True)
    return RunRecord("search", "oom")


def test_without_a_server_they_are_started(commands: None, tmp_path: Path) -> None:
    row = Row(Point.of([*TUNE, "engine=ddp"]))
    run_point.run_point(row, tmp_path, compose(row.point.overrides), here=False, server="regatta-none")
    assert row.record and row.record.status == "ok"


@pytest.mark.full
def test_searches_at_once_find_what_each_finds_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []
    for name, cores in (("together", 2), ("alone", 1)):
        monkeypatch.setattr(devices, "cores", lambda cores=cores: cores)
        rows = local.rows_of([*TUNE, "engine=ddp,gpipe"])
        assert local.run_to_end(rows, tmp_path / name) == 0
        records = [row.record for row in rows if row.record]
        assert len(records) == 2 and all(record.status == "ok" for record in records)
        tables.append([record.metrics["tuned"]["kinds"] for record in records])
    assert tables[0] == tables[1]
