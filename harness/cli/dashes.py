"""Keys that are typed as options: `--engine gpipe --micro-batch-size=2` is engine=gpipe batch.micro_batch_size=2."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from harness.cli.compose import mistyped
from harness.core.problem import apply, combined

OPTION = re.compile(r"--?[A-Za-z]")


def taken_away(arguments: Sequence[str], unknown: Collection[str]) -> list[str]:
    """The command as it is typed here, with the fixes of what is no key; `unknown` options do not exist."""
    found = list(_without_dashes(arguments, unknown))
    own = [text for text in found if OPTION.match(text) or "=" not in text]
    overrides = [text for text in found if text not in own]
    fixes = [problem.fixes[:1] for problem in mistyped(overrides)]
    right = all(fixes)  # what a fix says of a sweep's values may not hold for all of them
    return own + (apply(overrides, combined([fix for (fix,) in fixes])) if right else overrides)


def _without_dashes(arguments: Sequence[str], unknown: Collection[str]) -> Iterator[str]:
    """Each argument, unknown options as key=value: the value is the next argument, or true if that is another key."""
    rest = list(arguments)
    while rest:
        text = rest.pop(0)
        if text not in unknown or not OPTION.match(text):
            yield text
            continue
        name, equals, value = text.partition("=")
        if not equals:
            value = rest.pop(0) if rest and not OPTION.match(rest[0]) and "=" not in rest[0] else "true"
        yield f"{name.lstrip('-').replace('-', '_')}={value}"
