"""Rules: which of the ops that are ready in a queue runs next. One object for engines and simulator alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from harness.op import Op

RuleName = Literal["in_order", "fifo", "forward_first", "backward_first", "alternate"]
RULES: tuple[RuleName, ...] = get_args(RuleName)


def pick(rule: RuleName, ready: Sequence[Op], last: Op | None) -> int:
    """Index of the op that runs next; `ready` (not empty) in order of arrival, `last` is the one that ran before.

    fifo           what came first
    forward_first  the first forward task, else what came first
    backward_first the first op that is no forward task, else what came first
    alternate      the other kind than `last`, where there is one; backward first at the start

    Whatever the rule, a recomputation is followed by its own backward task, if that is ready. "in_order" is no rule:
    such a queue has a fixed order. Raises ValueError for it.
    """
    if rule == "in_order":
        raise ValueError("a queue in a fixed order has no rule")
    if last is not None and last.kind == "R":
        own = ("B", last.stage, last.micro_batch)
        for index, op in enumerate(ready):
            if (op.kind, op.stage, op.micro_batch) == own:
                return index
    if rule == "fifo":
        return 0
    wanted = rule == "forward_first" or (rule == "alternate" and last is not None and not last.forward)
    return next((index for index, op in enumerate(ready) if op.forward == wanted), 0)
