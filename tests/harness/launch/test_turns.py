"""Turns over a socket: what a worker waits for, and what each end sees when the other one is gone."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.core.run_files import LOG, STOP
from harness.launch import turns
from harness.launch.turns import RaceLost, TurnGiver, Turns


@pytest.fixture
def giver() -> Iterator[TurnGiver]:
    with TurnGiver() as found:
        yield found


@pytest.fixture
def worker(giver: TurnGiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turns:
    """The turns of the run "a b", whose worker has come."""
    monkeypatch.setattr(turns, "ALIVE_S", 0.01)
    for name, value in giver.environment("a b").items():
        monkeypatch.setenv(name, value)
    found = Turns.of_environment(tmp_path)
    assert found and giver.came(5.0) == "a b"
    return found


def test_without_a_race_there_are_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.VARIABLE, raising=False)
    assert Turns.of_environment(tmp_path) is None


def test_a_race_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(turns.VARIABLE, "regatta-race-none a")
    with pytest.raises(RaceLost, match="on another machine"):
        Turns.of_environment(tmp_path)


def test_turns_and_their_figures(giver: TurnGiver, worker: Turns) -> None:
    seat = giver.seats["a b"]
    for number in range(3):
        assert seat.answer(0.0) is None
        seat.give()
        assert worker.wait() == "turn"
        worker.took(step_time_s=0.5 + number)
        assert seat.answer(5.0) == {"step_time_s": 0.5 + number}
    seat.end()
    assert worker.wait() == "end"


def test_who_waits_shows_that_it_is_alive(giver: TurnGiver, worker: Turns, tmp_path: Path) -> None:
    log = tmp_path / LOG
    log.touch()
    os.utime(log, (0, 0))
    timer = threading.Timer(0.2, giver.seats["a b"].give)
    timer.start()
    assert worker.wait() == "turn"
    timer.join()
    assert log.stat().st_mtime > 0


def test_who_waits_can_be_stopped(worker: Turns, tmp_path: Path) -> None:
    (tmp_path / STOP).touch()
    assert worker.wait() == "stop"


def test_a_race_that_is_gone(giver: TurnGiver, worker: Turns) -> None:
    giver.seats["a b"].connection.close()
    with pytest.raises(RaceLost):
        worker.wait()


def test_a_worker_that_is_gone(giver: TurnGiver, worker: Turns) -> None:
    worker.socket.close()
    seat = giver.seats["a b"]
    seat.give()
    seat.end()
    with pytest.raises(EOFError):
        seat.answer(5.0)


def test_a_worker_that_ends_as_it_comes_has_no_seat(giver: TurnGiver) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ended:
        ended.connect(f"\0{giver.name}")
    assert giver.came(5.0) is None and not giver.seats


def test_nobody_comes(giver: TurnGiver) -> None:
    assert giver.came(0.0) is None
