"""What signals do while ranks train: they are noted, the ranks are asked to stop, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core.run_files import STOP
from harness.launch.signals import Preempted, preemptible
from harness.run import checkpoint_files, stop_request
from harness.run.stop_request import StopRequest

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("left", [Path.touch, Path.mkdir, os.mkfifo])
def test_a_signal_asks_the_ranks_to_stop(number: int, left: Callable[[Path], None], tmp_path: Path) -> None:
    said: list[str] = []
    name = signal.Signals(number).name
    left(tmp_path / STOP)  # there from an earlier start
    with preemptible() as signals, StopRequest(tmp_path, signals, 30, said.append) as stop:
        stop.check()
        assert not (tmp_path / STOP).exists()
        kill(number)
        stop.check()
        assert (tmp_path / STOP).exists()
        stop.check()
        assert said == [f"{name}: the run stops after this step, and leaves a checkpoint"]
        assert str(stop.stopped(1)) == f"ended by {name} after 1 step; there is no checkpoint"
        checkpoint_files.place(tmp_path, 7).parent.mkdir()
        checkpoint_files.place(tmp_path, 7).touch()
        assert str(stop.stopped(8)) == f"ended by {name} after 8 steps; the last checkpoint is after 7 steps"
    assert not (tmp_path / STOP).exists()


@pytest.mark.parametrize("first", NUMBERS)
def test_ctrl_c_after_it_ends_the_run_at_once(first: int, tmp_path: Path) -> None:
    with preemptible() as signals, pytest.raises(Preempted, match="ended by SIGINT"), StopRequest(tmp_path, signals, 30, print):  # fmt: skip # noqa: E501
        kill(first)
        kill(signal.SIGTERM)
        kill(signal.SIGUSR1)  # what a scheduler sends again and again is no hurry
        kill(signal.SIGINT)


def test_outside_of_training_a_signal_ends_the_run(tmp_path: Path) -> None:
    with preemptible() as signals:
        with StopRequest(tmp_path, signals, 30, print):
            pass
        with pytest.raises(Preempted, match="ended by SIGUSR1"):
            kill(signal.SIGUSR1)


def test_ranks_that_take_too_long_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: now)
    with preemptible() as signals, StopRequest(tmp_path, signals, 5, print) as stop:
        kill(signal.SIGTERM)
        stop.check()
        now = 105.0
        stop.check()
        now = 105.1
        reported = r"ended by SIGTERM: its ranks did not stop within launch.grace_s=5 s; there is no checkpoint"
        with pytest.raises(Preempted, match=reported):
            stop.check()
