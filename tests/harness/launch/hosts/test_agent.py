"""The agent of a host: which ends of its ranks it reports."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest

from harness.launch.hosts import agent


class Ending:
    """A rank that was killed and has ended after `seconds`; until then it has only lost its connections."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def poll(self) -> int | None:
        return -signal.SIGKILL if time.monotonic() >= self.end else None


def watched(monkeypatch: pytest.MonkeyPatch, *ranks: Any) -> int:
    """The exit code of an agent whose stdin has ended."""
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        return agent.watch("b", 2, ranks)


def test_a_rank_that_is_ending_when_all_are_to_end_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its peer on another host has noticed before, and the starter wants the end of all."""
    assert watched(monkeypatch, Ending(60), Ending(0.3)) == 1
    assert capsys.readouterr().out == "launch: error: b: task 3: Killed\n"


def test_ranks_that_go_on_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert watched(monkeypatch, Ending(60)) == 1
    assert time.monotonic() - began < agent.LATE_S + 1 and capsys.readouterr().out == ""
