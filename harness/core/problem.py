"""Why a run cannot start: one type for every check, and the only place that turns it into text.

check(config)  ->  [Problem("mesh.pipeline", 16, "needs 16 devices, the cluster has 8", ({"mesh.pipeline": 8},))]

table(...)             mesh.pipeline 16   needs 16 devices, the cluster has 8   -> mesh.pipeline=8
apply(overrides, fix)  ["engine=gpipe", "mesh.pipeline=16"]  ->  ["engine=gpipe", "mesh.pipeline=8"]
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

Fix = dict[str, Any]
"""Overrides that belong together: {"mesh.pipeline": 2, "cluster.devices": 4}. `LEAVE_OUT` takes a key away."""
LEAVE_OUT = "~"
"""Value in a fix that removes the key from the command."""
NOT_TEXT = r"(null|true|false|nan|[+-]?(inf|[\d_.]+(e[+-]?\d+)?))$"
WIDTH = 120
"""Columns of a table, if its messages are not longer."""
PLAIN = re.compile(rf"(?!{NOT_TEXT})[\w./:*+-]+", re.ASCII | re.IGNORECASE)
"""Texts that need no quotes on the command line: Hydra reads them as texts."""


@dataclass(frozen=True)
class Problem:
    """One reason why a run cannot start, or a note about a run that can.

    `key` is the user's key alone ("mesh.pipeline"); what has no key is named ("squeue", a file). `value` is what was
    given, None if nothing was. `message` follows both, with both numbers; if several keys are to blame, it names the
    others. Each of the `fixes` is enough by itself, the first one is preferred. `hint` is advice that no override can
    carry: a command to run, a value that only the user knows. `numbers` are those of the message that a program may
    need: {"needed_bytes": ..., "available_bytes": ...}.
    """

    key: str
    value: Any
    message: str
    fixes: tuple[Fix, ...] = ()
    hint: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """A value is what JSON has: a record and a worker's report keep problems."""
        if not isinstance(self.value, str | int | float | list | tuple | dict | None):
            object.__setattr__(self, "value", str(self.value))

    @property
    def statement(self) -> str:
        """Key, value and message in a line: "mesh.pipeline 16 needs 16 devices, the cluster has 8"."""
        return f"{self.subject} {self.message}"

    @property
    def subject(self) -> str:
        """Key and value: "mesh.pipeline 16"; texts without quotes, except for an empty one."""
        shown = self.value if isinstance(self.value, str) and self.value else spelled(self.value)
        return self.key if self.value is None else f"{self.key} {shown}"


UNNAMED = "this run"
"""The title of problems where nobody has said what cannot run."""


class CannotRun(Exception):
    """The run cannot start; carries every `Problem` that was found."""

    def __init__(self, problems: Sequence[Problem], title: str = UNNAMED) -> None:
        self.problems = tuple(problems)
        self.title = title
        super().__init__(table(problems, title))

    def __reduce__(self) -> tuple[Any, ...]:
        """A rank hands it to its host, with what is noted."""
        return CannotRun, (self.problems, self.title), {"__notes__": getattr(self, "__notes__", [])}


class ProblemError(ValueError):
    """What a function was asked for is not possible; carries the problems, whose lines are its text."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(map(line, self.problems))


class NoPlan(Exception):
    """A planner found no plan.

    Fixes that take long to find are found by `find`, only when `problem` is read: tune asks many candidates whether
    there is a plan, and prints the fixes of one.
    """

    def __init__(self, unsolved: Problem, find: Callable[[], Sequence[Fix]] | None = None) -> None:
        super().__init__(unsolved)
        self.unsolved, self._find = unsolved, find

    @cached_property
    def problem(self) -> Problem:
        """The problem with all its fixes."""
        return replace(self.unsolved, fixes=tuple(self._find())) if self._find else self.unsolved

    def __str__(self) -> str:
        return line(self.problem)


def refuse(problems: Sequence[Problem], title: str = UNNAMED) -> None:
    """Raise `CannotRun` if there are any problems."""
    if problems:
        raise CannotRun(problems, title)


def deduplicate(problems: Sequence[Problem]) -> list[Problem]:
    """Keep one of equal problems. If the first fixes of two set a key to different numbers, keep the smaller one and
    drop the alternatives, which would fix only one of the two."""
    kept: dict[tuple[str, ...], Problem] = {}
    for problem in problems:
        first = problem.fixes[0] if problem.fixes else {}
        numbers = first if all(isinstance(number, int) for number in first.values()) else {}
        place = (problem.key, *numbers) if numbers else (problem.key, problem.message)
        former = kept.setdefault(place, problem)
        if numbers and former.fixes[0] != numbers:
            least = {key: min(number, former.fixes[0][key]) for key, number in numbers.items()}
            kept[place] = replace(problem if least == numbers else former, fixes=(least,), hint="")
    return list(kept.values())


def after_fixes(problems: Sequence[Problem], key: str, value: int) -> int:
    """Return the smallest value that the first fixes of the problems give to a key, at most `value`."""
    first = [problem.fixes[0] for problem in problems if problem.fixes]
    return min([value, *(fix[key] for fix in first if key in fix)])


def apply(overrides: Sequence[str], fix: Fix) -> list[str]:
    """The overrides with a fix: its keys, however they were typed before, and those below them are replaced; what a
    fix gives with its sign (~steps, engine@twin) is taken away in that form alone."""

    def replaced(text: str) -> bool:
        typed_key, key = text.partition("=")[0], bare_key(text)
        return any(other in (typed_key, key) or key.startswith(f"{other}.") for other in fix)

    kept = [text for text in overrides if not replaced(text)]
    return [*kept, *(f"{key}={spelled(value)}" for key, value in fix.items() if value != LEAVE_OUT)]


def leaving_out(problems: Sequence[Problem], overrides: Sequence[str]) -> list[Problem]:
    """The problems, whose fixes say what `apply` takes away: a fix that chooses another of a group leaves out the keys
    typed for the former one, "precision=fp32 without precision.dtype"."""
    keys = [bare_key(text) for text in overrides]

    def complete(fix: Fix) -> Fix:
        below = [key for key in keys if any(key.startswith(f"{group}.") for group in fix)]
        return dict.fromkeys(below, LEAVE_OUT) | fix

    return [replace(problem, fixes=tuple(map(complete, problem.fixes))) for problem in problems]


def bare_key(override: str) -> str:
    """The key of an override, without the signs of Hydra: "steps" of +steps=3 and ~steps, "engine" of engine@twin=x."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def combined(fixes: Sequence[Fix]) -> Fix:
    """Fixes of several problems as one: of a key the last one counts; a group that one fix chooses loses the keys that
    another sets in it."""
    found: Fix = {}
    for number, fix in enumerate(fixes):
        others = [other for place, one in enumerate(fixes) if place != number for other in one]
        found |= {key: value for key, value in fix.items() if not any(key.startswith(f"{one}.") for one in others)}
    return found


def typed(fix: Fix) -> str:
    """A fix as the user types it: "mesh.pipeline=2 cluster.devices=4", "engine=gpipe without engine.zero"."""
    given = " ".join(f"{key}={spelled(value)}" for key, value in fix.items() if value != LEAVE_OUT)
    gone = " and ".join(key for key, value in fix.items() if value == LEAVE_OUT)
    return " ".join(filter(None, [given, gone and f"without {gone}"]))


def spelled(value: Any) -> str:
    """A value as it is typed: null, true, [1,2], 0.5, text, 'any other text'."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, int | float):
        return repr(value).removesuffix(".0")
    text = str(value)
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text)
    return text if PLAIN.fullmatch(text) else f"'{quoted}'"


def table(problems: Sequence[Problem], title: str) -> str:
    """The problems as an aligned table under one heading; fixes that do not fit into WIDTH columns stand below,
    and messages are wrapped. Further lines of a message, as of a traceback, and of a hint stay as they are."""
    rows = [(problem.subject, problem.message, advice(problem)) for problem in problems]
    subjects, messages, fixes = (max((len(row[column]) for row in rows), default=0) for column in range(3))
    lines = [f"{title} cannot run:"]
    plain = not any("\n" in text for row in rows for text in row)
    if plain and subjects + messages + fixes + len("     " + "   -> ") <= WIDTH:
        for subject, message, advised in rows:
            lines.append(f"  {subject:<{subjects}}   {message:<{messages}}   {advised and f'-> {advised}'}".rstrip())
        return "\n".join(lines)
    column = min(subjects, WIDTH // 4)
    indent = " " * (column + 5)
    for subject, message, advised in rows:
        first = f"{subject:<{column}}   {message}"
        first, *further = first.split("\n")
        lines += textwrap.wrap(
            first, WIDTH, initial_indent="  ", subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += [f"      {line}".rstrip() for line in further]
        lines += [f"{indent}-> {advised}".replace("\n", f"\n{indent}   ")] if advised else []
    return "\n".join(lines)


def note(problem: Problem) -> str:
    """The line for what is no reason to refuse a run and should be known."""
    return f"note: {line(problem)}"


def line(problem: Problem) -> str:
    """A problem in one line, with its fixes."""
    fixes = advice(problem)
    return f"{problem.subject}   {problem.message}" + (f"   -> {fixes}" if fixes else "")


def advice(problem: Problem) -> str:
    """All fixes and the hint: "mesh.pipeline=2, or cluster.devices=4"; "" if there are none."""
    return ", or ".join(filter(None, [*map(typed, problem.fixes), problem.hint]))
