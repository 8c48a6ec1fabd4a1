"""Rounds that are broken off, races after one that was, and results in which the first entry is missing."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from harness.cli.compose import compose
from harness.core.problem import CannotRun, Problem
from harness.core.record import EXIT_CODES, RunRecord
from harness.core.run_files import RACE, RACE_PICTURE
from harness.launch.signals import Preempted
from harness.races import display, entries, race, result
from harness.races.display import Display
from harness.races.entries import Entry
from harness.sweep.points import Point
from harness.sweep.row import Row

CONFIG: Any = SimpleNamespace(race=SimpleNamespace(minutes=5.0))


def entry(name: str, rounds_s: list[float] | None = None, status: Any = "ok") -> Entry:
    config = {"model": {"name": "mlp"}, "batch": {"size": 8}, "engine": {"name": name}}
    row = Row(Point.of([f"engine={name}"]), record=RunRecord(name, status, config=config, reason="no luck"))
    return Entry(name, row, CONFIG, rounds_s or [])


def quiet(width: int = 160) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_round_that_is_broken_off_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes in the second entry's third turn: the first one has had it already."""
    both = [entry("single"), entry("gpipe")]
    held = race.Race(both, tmp_path, None, Display(both, quiet()))

    def turn(self: object, one: Entry, seat: object) -> None:
        if one.name == "gpipe" and len(one.rounds_s) == 2:
            raise KeyboardInterrupt
        one.rounds_s.append(1.0)

    monkeypatch.setattr(race.Race, "_turn", turn)
    monkeypatch.setattr(race.Race, "_alive", lambda self, giver: both)
    with pytest.raises(KeyboardInterrupt):
        held._go_round(SimpleNamespace(seats=dict.fromkeys(("single", "gpipe"))))  # type: ignore[arg-type]
    assert [len(one.rounds_s) for one in both] == [2, 2]
    assert [one.name for one in result.of(both, tmp_path, 1.0, 0.5).finished] == ["single", "gpipe"]


@pytest.mark.parametrize(("minutes", "rounds"), [(5.0, 7), (1e-9, 1)])
def test_the_minutes_count_from_the_first_round_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, rounds: int
) -> None:
    """However long entries have taken to start; when the minutes are over no further round begins."""
    both = [entry("single"), entry("gpipe")]
    for one in both:
        one.config = SimpleNamespace(race=SimpleNamespace(minutes=minutes))  # type: ignore[assignment]
    held = race.Race(both, tmp_path, None, Display(both, quiet()))
    held.began_s -= 60 * 60
    monkeypatch.setattr(race.Race, "_turn", lambda self, one, seat: one.rounds_s.append(1.0))
    monkeypatch.setattr(race.Race, "_alive", lambda self, giver: both)
    held._go_round(SimpleNamespace(seats=dict.fromkeys(("single", "gpipe"))))  # type: ignore[arg-type]
    assert [len(one.rounds_s) for one in both] == [rounds, rounds]
    assert held.rounds_began_s is not None and held.rounds_began_s - held.began_s > 60 * 60


def test_a_log_says_what_an_entry_does_until_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, console = [entry("single"), entry("gpipe")], quiet()
    monkeypatch.setattr(display, "SAY_S", 0.0)
    shown, log = Display(both, console), tmp_path / "console"
    shown.starts(both[1], log)
    shown.refresh()  # it has said nothing yet
    log.write_text("counting  mlp\nprofiling  mlp, micro-batches of 2\n")
    shown.refresh()
    shown.refresh()
    shown.started(both[1], ready=True)
    shown.refresh()
    assert printed(console).splitlines() == [
        "gpipe starts, entry 2 of 2",
        "gpipe: profiling  mlp, micro-batches of 2",
        "gpipe is ready",
    ]


def test_intervals_are_not_computed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a core for a while, which a run that is being measured may need."""
    both, computed = [entry("single", [2.0] * 7), entry("gpipe", [1.0] * 7)], []

    def ratio(own: list[float], first: list[float]) -> str:
        computed.append(own)
        return "2.00"

    monkeypatch.setattr(display, "ratio", ratio)
    monkeypatch.setattr(display, "DRAW_S", 0.0)
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Display(both, console) as shown:
        for _ in range(3):
            shown.refresh()
        assert not computed
        shown.round_ended(7, ["single", "gpipe"])
        shown.refresh()
    assert len(computed) == 2 and "2.00" in printed(console)


def test_many_rounds_are_not_judged_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def is_decided(rounds_s: dict[str, list[float]]) -> bool:
        asked.append(len(rounds_s["a"]))
        return False

    monkeypatch.setattr(race, "is_decided", is_decided)
    both = [entry("a"), entry("b")]
    for number in range(1, 201):
        for one in both:
            one.rounds_s = [1.0] * number
        assert not race.Race._is_decided(both)
    assert asked[:7] == [1, 2, 3, 4, 5, 6, 7] and len(asked) < 80


def test_no_further_race_begins_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = []

    def hold(entered: object, folder: Path, rounds: object, console: object) -> tuple[int, Any]:
        began.append(folder.name)
        return EXIT_CODES["preempted"], None

    monkeypatch.setattr(entries, "races", lambda overrides, several: {"a": [], "b": []})
    monkeypatch.setattr(entries, "entered", lambda overrides: [])
    monkeypatch.setattr(race, "_hold", hold)
    assert race.main([f"out={tmp_path}"], several=True) == 130 and began == ["a"]


def test_a_signal_is_handed_on_to_the_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records name it: a race that got SIGTERM had entries that were "ended by SIGINT"."""
    ended = []

    def run_point(
        row: Row, place: Path, config: Any, waiting: Callable[[], None], environment: object, among: str
    ) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            while True:
                waiting()
                time.sleep(0.01)
        except Preempted as error:
            ended.append(error.number)
            raise

    both = [entry("single"), entry("gpipe")]
    for one in both:
        one.row.record = None
    monkeypatch.setattr(race.run_point, "run_point", run_point)
    monkeypatch.setattr(race.supervisor, "start_fork_server", lambda: None)
    assert race._hold(both, tmp_path, None, quiet())[0] == EXIT_CODES["preempted"]
    assert ended == [signal.SIGTERM]


def test_the_first_that_has_finished_is_the_reference(tmp_path: Path) -> None:
    entered = [entry("single", status="oom"), entry("gpipe", [2.0] * 7), entry("ddp", [1.0] * 7)]
    found, console = result.of(entered, tmp_path, 1.0, 0.5), quiet()
    found.show(console)
    assert {name: str(one) for name, one in found.ratios.items()} == {
        "gpipe": "1.00 (1.00 to 1.00)", "ddp": "2.00 (2.00 to 2.00)",
    }  # fmt: skip
    assert "gpipe (95 %)" in printed(console) and "single oom" in printed(console)
    assert json.loads((tmp_path / RACE).read_text())["reference"] == "gpipe" and (tmp_path / RACE_PICTURE).exists()


def test_nobody_has_finished(tmp_path: Path) -> None:
    entered = [entry("single", status="oom"), entry("gpipe", status="error")]
    result.of(entered, tmp_path, 1.0, 0.5).show(console := quiet())
    assert "0 rounds of 0 entries" in printed(console) and not (tmp_path / RACE_PICTURE).exists()
    assert json.loads((tmp_path / RACE).read_text())["interrupted"] is False


def test_an_interrupted_race_says_so(tmp_path: Path) -> None:
    entered = [entry("single", status="oom"), entry("gpipe", status="error")]
    result.of(entered, tmp_path, 1.0, 0.5, interrupted=True).show(console := quiet())
    assert "interrupted: the race was not over after 0 rounds" in printed(console)
    assert json.loads((tmp_path / RACE).read_text())["interrupted"] is True


def test_a_full_disk_does_not_hide_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    both, console = [entry("single"), entry("gpipe")], quiet()
    for one in both:
        one.row.record = None
    monkeypatch.setattr(race.run_point, "run_point", full)
    monkeypatch.setattr(race.supervisor, "start_fork_server", lambda: None)
    with pytest.raises(CannotRun, match=r"No\s+space\s+left"):
        race._hold(both, tmp_path, None, console)
    assert "gpipe" in printed(console) and "failed: " in printed(console) and (tmp_path / RACE).exists()


def test_the_table_is_shown_also_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found, console = result.of([entry("single", [1.0]), entry("gpipe", [1.0])], tmp_path / "file", 1.0, 0.5), quiet()
    with pytest.raises(OSError):
        found.show(console)
    assert "1 rounds of 2 entries" in printed(console)


def test_the_folder_is_looked_at_before_the_entries_are_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race of many points composes for a while; one that is refused leaves no folder."""
    composed = []

    def entered(overrides: object) -> list[Entry]:
        composed.append(overrides)
        raise CannotRun([Problem("batch.size", 7, "is odd")])

    monkeypatch.setattr(entries, "races", lambda overrides, several: {"a": [], "b": []})
    monkeypatch.setattr(entries, "entered", entered)
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "file").touch()
    with pytest.raises(CannotRun, match="holds something already"):
        race.main([f"out={tmp_path / 'race'}"], several=True)
    assert not composed
    for name, left in (("new", False), ("empty", True)):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(CannotRun, match="is odd"):
            race.main([f"out={tmp_path / name}"], several=True)
        assert (tmp_path / name).exists() == left
    assert len(composed) == 2


def test_an_entry_that_is_stopped_ends_with_its_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends without a record: the reason is that of a race, not of a sweep."""

    def execute(overrides: object, console: object, waiting: Callable[[], None], *rest: object) -> int:
        held.stopped = {"single"}
        waiting()
        return 0

    one = entry("single")
    one.row.record, one.config = None, compose(["engine=single", "model=mlp"])
    held = race.Race([one], tmp_path, None, Display([one], quiet()))
    monkeypatch.setattr(race.run_point, "_execute", execute)
    held._follow(one, SimpleNamespace(environment=lambda name: {}))  # type: ignore[arg-type]
    assert one.row.record is not None
    found: RunRecord = one.row.record
    assert (found.status, found.reason) == ("preempted", "ended with its race")
