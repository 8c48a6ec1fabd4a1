"""What tests assert of problems: keys, values and fixes, and not the sentences, which golden files hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from harness.core.problem import CannotRun, NoPlan, Problem, ProblemError, advice, typed

Row = tuple[str, Any, list[str]]


def row(problem: Problem) -> Row:
    """("mesh.pipeline", 16, ["mesh.pipeline=8", "cluster.devices=16"])"""
    return problem.key, problem.value, fixes(problem)


def rows(problems: Iterable[Problem]) -> list[Row]:
    return [row(problem) for problem in problems]


def fixes(problem: Problem) -> list[str]:
    """Each fix as the user types it."""
    return [typed(fix) for fix in problem.fixes]


def keys(problems: Iterable[Problem]) -> list[str]:
    return [problem.key for problem in problems]


def refused(
    caught: pytest.ExceptionInfo[CannotRun] | pytest.ExceptionInfo[NoPlan] | pytest.ExceptionInfo[ProblemError],
) -> list[Problem]:
    """The problems that an exception carries."""
    error = caught.value
    return [error.problem] if isinstance(error, NoPlan) else list(error.problems)


def faults(problems: Iterable[Problem]) -> list[tuple[str, str]]:
    """What each is about and what to do: of schedules, whose ops and stages are no keys."""
    return [(problem.key, advice(problem)) for problem in problems]


def replaced(problems: Iterable[Problem]) -> dict[str, list[Any]]:
    """The values that the fixes give the keys themselves: {"batch.micro_batches": [8, 4]}."""
    return {problem.key: [fix[problem.key] for fix in problem.fixes] for problem in problems}
