"""Why candidates are impossible: each distinct reason once, with its count and the fixes that help.

engine sbp   needs a plan that says how 2 devices split each matmul
engine sbp   needs a plan that says how 8 devices split each matmul
                                        v
2 impossible: engine sbp   needs a plan that says how 2 and 8 devices split each matmul   -> planner=autoddl
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

from harness.core import problem
from harness.core.problem import Fix, Problem
from harness.planning.tune.result import Line, Reason

SHOWN = 3
"""The reasons that are printed, those of the most candidates."""
MOST = 6
"""Numbers that are listed one by one."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
Helps = Callable[[Line, Fix], bool]
"""Whether a fix makes a candidate possible."""


def reasons(lines: Sequence[Line], helps: Helps) -> tuple[Reason, ...]:
    """Sum up the first problems of candidates that are out, but not for memory, the most frequent reason first.

    Problems that differ only in numbers are one reason: "2 and 8 devices". A fix is shown if all of its candidates have
    it, and it helps the first or the last one of them.
    """
    groups: dict[str, list[Line]] = defaultdict(list)
    for one in lines:
        if one.out and not one.full:
            groups[NUMBER.sub("#", one.out)].append(one)
    most = sorted(groups.values(), key=len, reverse=True)[:SHOWN]
    return tuple(Reason(len(group), _text(group, helps)) for group in most)


def _text(group: Sequence[Line], helps: Helps) -> str:
    found, ends = [one.problems[0] for one in group], (group[0], group[-1])
    known = found[-1]
    values, hints = [one.value for one in found], {one.hint for one in found}
    common = [fix for fix in known.fixes if all(fix in one.fixes for one in found)]
    summed = Problem(
        known.key,
        known.value if values.count(known.value) == len(values) else _joined(list(map(str, values))),
        _joined([one.message for one in found]),
        tuple(fix for fix in common if any(helps(one, fix) for one in ends)),
        known.hint if len(hints) == 1 else "",
    )
    return problem.line(summed)


def _joined(texts: Sequence[str]) -> str:
    """Texts that differ only in numbers as one: "2, 4 and 8 devices" of "2 devices", "4 devices" and "8 devices"."""
    columns = zip(*(NUMBER.findall(text) for text in texts), strict=True)
    listed = (_listed(sorted(set(found), key=float)) for found in columns)
    return NUMBER.sub(lambda _: next(listed), texts[0])


def _listed(numbers: Sequence[str]) -> str:
    """2, 4 and 8; of many the first ones and the last: 3, 5, 6, ... and 31."""
    *others, last = numbers
    first = others if len(others) < MOST else [*others[: MOST - 1], "..."]
    return f"{', '.join(first)} and {last}" if first else last
