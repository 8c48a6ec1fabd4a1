"""Rules that pick which of the ready ops of a queue runs next, for engines and for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from harness.core.op import Op

RuleName = Literal["in_order", "fifo", "forward_first", "backward_first", "alternate"]
RULES: tuple[RuleName, ...] = get_args(RuleName)


def pick(rule: RuleName, ready: Sequence[Op], last: Op | None) -> int:
    """Returns the index of the op that runs next; `ready` (not empty) in order of arrival, `last` is the previous op.

    fifo           what came first
    forward_first  the first forward task, else what came first
    backward_first the first op that is no forward task, else what came first
    alternate      the other kind than `last`, where there is one; backward first at the start

    Whatever the rule, a recomputation is followed by its own backward task, if that is ready. Raises ValueError for
    "in_order", which is a fixed order.
    """
    if rule == "in_order":
        raise ValueError("a queue in a fixed order has no rule")
    if last is not None and last.kind == "R":
        its_backward = ("B", last.stage, last.micro_batch)
        for index, op in enumerate(ready):
            if (op.kind, op.stage, op.micro_batch) == its_backward:
                return index
    if rule == "fifo":
        return 0
    prefer_forward = rule == "forward_first" or (rule == "alternate" and last is not None and not last.forward)
    return next((index for index, op in enumerate(ready) if op.forward == prefer_forward), 0)
