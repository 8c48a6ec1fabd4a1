"""The functions of arrays that numba compiles, in which large schedules are executed: by this process, or by another
one that has loaded them meanwhile (`harness.launch.second_process`)."""

from __future__ import annotations

from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

from harness.simulator.compiled.tables import Numbers, Seconds, Tables

other: Callable[..., Any] | None = None
"""Has a function of this module, by its name, executed by another process. It is asked no more once it has raised
OSError, EOFError or UnpicklingError."""


def start() -> None:
    """Loads the machine code, or waits until the other process has. Raises what `machine_code.start` does."""
    _called("start")


def execute(tables: Tables) -> tuple[Seconds, Seconds]:
    """Returns when each node starts and ends; one that never ran ends at -1."""
    found: tuple[Seconds, Seconds] = _called("execute", tables)
    return found


def fullest(*columns: Seconds | Numbers | int) -> tuple[int, float, int]:
    """Returns what `harness.simulator.compiled.fullest` does."""
    found: tuple[int, float, int] = _called("fullest", *columns)
    return found


def _called(name: str, *arguments: object) -> Any:
    global other
    if other is not None:
        try:
            return other(name, *arguments)
        except (OSError, EOFError, UnpicklingError):
            other = None
    from harness.simulator.compiled import machine_code

    return getattr(machine_code, name)(*arguments)
