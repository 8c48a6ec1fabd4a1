"""Draws a schedule: python -m harness.schedule gpipe stages=4 micro_batches=8

gpipe          stages micro_batches recompute dependency     (dependency=false: torchgpipe without fork and join)
one_f_one_b    stages micro_batches recompute
interleaved    stages micro_batches recompute chunks         (stages / chunks devices)
message_driven stages micro_batches recompute rule limit
single         micro_batches recompute
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from harness.schedule import Schedule
from harness.schedule.gpipe import RECOMPUTE, gpipe
from harness.schedule.grid import grid
from harness.schedule.hops import Hop, hops
from harness.schedule.interleaved import interleaved
from harness.schedule.message_driven import message_driven
from harness.schedule.one_f_one_b import one_f_one_b
from harness.schedule.rule import RuleName
from harness.schedule.single import single


def _hops(stages: int) -> list[Hop]:
    return hops([0] * (stages - 1), (), portals=True)


def _gpipe(
    stages: int = 4, micro_batches: int = 8, recompute: str = "except_last", dependency: bool = True
) -> Schedule:
    return gpipe(micro_batches, range(stages), _hops(stages), recompute, dependency)


def _one_f_one_b(stages: int = 4, micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return one_f_one_b(micro_batches, range(stages), _hops(stages), recompute)


def _interleaved(stages: int = 4, micro_batches: int = 8, recompute: str = "never", chunks: int = 2) -> Schedule:
    if stages % chunks:
        near = " or ".join(f"stages={k * chunks}" for k in (stages // chunks, stages // chunks + 1) if k)
        raise ValueError(f"stages {stages}   is no multiple of chunks {chunks}   -> {near}")
    return interleaved(micro_batches, stages // chunks, chunks, _hops(stages), recompute)


def _message_driven(
    stages: int = 4, micro_batches: int = 8, recompute: str = "never", rule: str = "fifo", limit: int | None = None
) -> Schedule:
    return message_driven(micro_batches, range(stages), _hops(stages), cast(RuleName, rule), limit, recompute)


def _single(micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return single(micro_batches, recompute)


DRAWN: dict[str, Callable[..., Schedule]] = {
    "gpipe": _gpipe,
    "one_f_one_b": _one_f_one_b,
    "interleaved": _interleaved,
    "message_driven": _message_driven,
    "single": _single,
}


def drawing(arguments: Sequence[str]) -> str:
    """The grid of the schedule that the command line names. Raises ValueError, in the user's keys."""
    name = arguments[0] if arguments else ""
    if name not in DRAWN:
        raise ValueError(f"{name or 'nothing'}   is none of {', '.join(DRAWN)}   -> gpipe")
    keys = inspect.signature(DRAWN[name]).parameters
    values: dict[str, Any] = {}
    for argument in arguments[1:]:
        key, equals, text = argument.partition("=")
        if not equals or key not in keys:
            raise ValueError(
                f"{argument}   is no KEY=VALUE of {name}, whose keys are {', '.join(keys)}   -> leave it out"
            )
        values[key] = _value(key, text)
    return grid(DRAWN[name](**values))


def _value(key: str, text: str) -> Any:
    if key == "recompute":
        if text not in RECOMPUTE:
            raise ValueError(f"recompute {text}   is none of {', '.join(RECOMPUTE)}   -> recompute=never")
        return text
    if key == "dependency":
        if text not in ("true", "false"):
            raise ValueError(f"dependency {text}   is neither true nor false   -> dependency=true")
        return text == "true"
    if key == "rule":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{key} {text}   is no whole number of at least 1   -> {key}=4")
    return int(text)


def main() -> int:
    """Exit code 2 where the command line names no schedule."""
    try:
        print(drawing(sys.argv[1:]))
    except ValueError as error:
        print(f"{error}\n\n{__doc__}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
