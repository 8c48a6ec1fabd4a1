"""Where tables and messages are printed."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console


def plain(file: TextIO | None = None, width: int | None = None, stderr: bool = False) -> Console:
    """A console that writes to `file`, by default to what is stdout (or stderr) at the time.

    In a notebook, too: there rich would display what it prints, past a redirection of stdout.
    """
    return Console(file=file, width=width, stderr=stderr, force_jupyter=False)


def silent() -> Console:
    """A console that prints nothing."""
    return Console(quiet=True, force_terminal=False, force_jupyter=False)
