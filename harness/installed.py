"""Whether an optional library is there, in the right version, asked without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def problem_line(engine: str, module: str, command: str, series: str = "") -> list[str]:
    """For an engine's `check`: a line that names the `command` which installs `module`; empty if it is there.

    `module` is a name without dots, as `import` and `pip` take it ("torchgpipe"). With `series` ("0.19") only its
    versions will do: 0.19.8, and not 0.20.0.
    """
    if find_spec(module) is None:
        return [f"engine {engine}   is not installed   -> {command}"]
    there = _version(module)
    if not series or f"{there}.".startswith(f"{series}."):
        return []
    return [f"engine {engine}   needs {module} {series}, there is {there}   -> {command}"]


def _version(module: str) -> str:
    try:
        return version(module)
    except PackageNotFoundError:  # a bare source tree
        return "an unknown version"
