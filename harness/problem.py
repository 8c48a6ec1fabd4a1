"""What is wrong with a run before it starts, in the user's own keys: all problems at once, each with its mend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Problem:
    """One reason why a run cannot start.

    `key` is the user's key and value ("mesh.pipeline 16"), `what` says it with both numbers, `mend` what to type.
    """

    key: str
    what: str
    mend: str = ""


def noted(problem: Problem) -> str:
    """What is no reason to refuse, and should be known, as a line."""
    return f"note: {problem.key}   {problem.what}   -> {problem.mend}"


class CannotRun(Exception):
    """The run cannot start; carries every `Problem` that was found."""

    def __init__(self, problems: Sequence[Problem], title: str = "this run") -> None:
        self.problems = tuple(problems)
        self.title = title
        super().__init__(table(problems, title))


class NoPlan(Exception):
    """A planner found no plan; names what binds. A `mend` that takes long to find may be a function: who only asks
    whether there is a plan does not wait for it."""

    def __init__(self, key: str, what: str, mend: str | Callable[[], str] = "") -> None:
        super().__init__(key, what)
        self.key, self.what, self._mend = key, what, mend

    @cached_property
    def problem(self) -> Problem:
        """The same, with what to type."""
        return Problem(self.key, self.what, self._mend if isinstance(self._mend, str) else self._mend())

    def __str__(self) -> str:
        mend = self.problem.mend
        return f"{self.key}: {self.what}" + (f" -> {mend}" if mend else "")


def table(problems: Sequence[Problem], title: str) -> str:
    """The problems as an aligned table under one heading."""
    key_width = max((len(p.key) for p in problems), default=0)
    what_width = max((len(p.what) for p in problems), default=0)
    lines = [f"{title} cannot run:"]
    for p in problems:
        line = f"  {p.key:<{key_width}}   {p.what:<{what_width}}"
        lines.append((f"{line}   -> {p.mend}" if p.mend else line).rstrip())
    return "\n".join(lines)
