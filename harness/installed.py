"""Whether an optional library is there, asked without importing it."""

from __future__ import annotations

from importlib.util import find_spec


def problem_line(engine: str, module: str, command: str) -> list[str]:
    """For an engine's `check`: a line that names the `command` which installs `module`; empty if it is there.

    `module` is a name without dots, as `import` takes it ("torchgpipe").
    """
    return [] if find_spec(module) else [f"engine {engine}   is not installed   -> {command}"]
