"""Phases and steps, live on a terminal and as lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from harness.core.problem import CannotRun, Problem
from harness.report.progress import Progress

ROOT = Path(__file__).resolve().parents[3]


def plain() -> Console:
    """A console that is a file, as in a log."""
    return Console(file=io.StringIO(), width=100)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_in_a_log_phases_are_lines_and_steps_are_occasional(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second: the first, every fifth after it, and the last are shown."""
    clock = iter(range(1000))
    monkeypatch.setattr("harness.report.progress.time.monotonic", lambda: float(next(clock)))
    console = plain()
    with Progress(console) as progress:
        progress.phase("profiling", "unet [x]")
        progress.phase("planning")
        progress.steps(12)
        for done in range(1, 13):
            progress.step(done, 1 / done, 100.0)
        progress.note("done")
    assert text(console).splitlines() == [
        "profiling  unet [x]",
        "planning",
        "step 1/12   loss 1.0000   100 samples/s",
        "step 6/12   loss 0.1667   100 samples/s",
        "step 11/12   loss 0.0909   100 samples/s",
        "step 12/12   loss 0.0833   100 samples/s",
        "done",
    ]


def test_in_a_log_what_has_not_changed_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10000, 10))
    monkeypatch.setattr("harness.report.progress.time.monotonic", lambda: float(next(clock)))
    console = plain()
    with Progress(console) as progress:
        progress.phase("searching")
        for found in (0, 0, 0, 7, 7):
            progress.detail(f"{found} simulated")
    assert text(console).splitlines() == ["searching", "searching  0 simulated", "searching  7 simulated"]


def test_a_phase_that_fails_says_so_and_the_error_goes_on() -> None:
    console = plain()
    with pytest.raises(ZeroDivisionError), Progress(console) as progress:
        progress.phase("planning")
        raise ZeroDivisionError
    first, second = text(console).splitlines()
    assert (first, second[:23]) == ("planning", "planning  failed after ")


def test_a_refusal_is_no_failure() -> None:
    console = plain()
    with pytest.raises(CannotRun), Progress(console) as progress:
        progress.phase("planning")
        raise CannotRun([Problem("mesh.pipeline", 2, "is too much")])
    assert text(console).splitlines() == ["planning"]


LIVE = """
from harness.report.progress import Progress
with Progress() as progress:
    progress.phase("planning", "balance")
    progress.steps(3)
    for done in (1, 2, 3):
        progress.step(done, 0.5, 100.0)
        progress.note(f"note {done}")
"""


def on_a_terminal(**more: str) -> str:
    """What LIVE writes to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI", "TTY_COMPATIBLE")}
    env = {**kept, "TERM": "xterm-256color", "COLUMNS": "100", "PYTHONPATH": str(ROOT), **more}
    child = subprocess.Popen([sys.executable, "-c", LIVE], stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    said = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        said += chunk
    os.close(ours)
    assert child.wait() == 0
    return said.decode()


def test_on_a_terminal_there_is_a_bar() -> None:
    said = on_a_terminal()
    assert "3/3" in said
    assert "loss 0.5000   100 samples/s" in said
    assert re.search(r"training  \d", said)
    assert said.index("note 1") < said.index("note 3")
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", said), "colours"
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h") > 0, "the cursor is shown again"


def test_no_color_and_dumb_terminals_are_honoured() -> None:
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38|9[0-7])[;m]", on_a_terminal(NO_COLOR="1"))
    assert "\x1b" not in on_a_terminal(TERM="dumb")


def test_an_ascii_terminal_is_enough() -> None:
    assert "3/3" in on_a_terminal(PYTHONIOENCODING="ascii")
