"""Runs Slurm's programs with a time limit: a controller that does not answer gives an error instead of a wait."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from harness.core.problem import CannotRun, Problem

LIMIT_S = 30.0
HERE = "python run.py -m ... runs the points here"
NO_CONTROLLER = "finds no Slurm controller from this machine"
UNREACHABLE = {
    "Munge encode failed": "has no munge on this machine, which Slurm needs",
    "configuration source": NO_CONTROLLER,
    "configuration file": NO_CONTROLLER,
    "getaddrinfo": NO_CONTROLLER,
    "Unable to contact": NO_CONTROLLER,
    "Connection refused": NO_CONTROLLER,
    "Unable to connect": NO_CONTROLLER,
}
"""Parts of what Slurm's programs say where they cannot ask a controller, and what that means."""


def ask(command: Sequence[str], title: str = "this array") -> str:
    """The output of a program. Raises CannotRun if it is not installed, does not answer, or fails."""
    program = command[0]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise _cannot(program, "is not found: this machine has no Slurm", HERE, title) from None
    except subprocess.TimeoutExpired:
        raise _cannot(program, f"has no answer within {LIMIT_S:g} s", "scontrol ping, and again later", title) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        if why := next((why for part, why in UNREACHABLE.items() if part in said), ""):
            raise _cannot(program, why, f"the same command on a login node of the cluster; {HERE}", title)
        raise _cannot(program, said, "", title)
    return done.stdout


def _cannot(program: str, message: str, hint: str, title: str) -> CannotRun:
    return CannotRun([Problem(program, None, message, hint=hint)], title)
