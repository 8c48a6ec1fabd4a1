"""Consoles write to the stdout of the moment, in a notebook too."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
import rich.console

from harness.report import closing_table
from harness.report.console import plain, silent
from harness.sweep.table import console_of_sweep


def test_in_a_notebook_stdout_can_be_redirected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    for make in (plain, closing_table.console, console_of_sweep):
        with redirect_stdout(io.StringIO()) as printed:
            make().print("a table")
        assert printed.getvalue() == "a table\n"


def test_the_silent_one_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent().print("a table")
    assert capsys.readouterr().out == "" and not silent().is_terminal
