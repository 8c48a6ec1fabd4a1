"""Slurm's own programs, each with a time limit: a controller that does not answer ends in a reason, not in a wait."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from harness.problem import CannotRun, Problem

LIMIT_S = 30.0


def ask(command: Sequence[str], title: str = "this array") -> str:
    """What a client prints. Raises CannotRun if it is not there, has no answer, or says no."""
    program = command[0]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise _cannot(program, "is not found: this machine has no Slurm", "python run.py -m ... runs the points here",
                      title) from None  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _cannot(program, f"has no answer within {LIMIT_S:g} s", "scontrol ping, and again later", title) from None
    if done.returncode:
        raise _cannot(program, " ".join((done.stderr or done.stdout).split()), "", title)
    return done.stdout


def _cannot(program: str, what: str, mend: str, title: str) -> CannotRun:
    return CannotRun([Problem(program, what, mend)], title)
