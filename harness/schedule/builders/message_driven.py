"""A pipeline without a fixed order: each device runs what has arrived, by a policy (Myelin, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.op import Op
from harness.core.problem import Problem, ProblemError
from harness.schedule import Schedule, collect_queues
from harness.schedule.builders.one_f_one_b import backward
from harness.schedule.policy import RULES, RuleName
from harness.schedule.transfers import Transfer, with_messages


def message_driven(
    micro_batches: int,
    devices: Sequence[int],
    transfers: Sequence[Transfer],
    rule: RuleName = "fifo",
    limit: int | None = None,
    recompute: str = "never",
) -> Schedule:
    """Returns a pipeline without a fixed order.

    Each device's compute queue picks by `rule` (harness.schedule.policy) among the tasks whose message has arrived.

    At most `limit` micro-batches are in the pipeline at once: the first stage begins another one when one has come
    back. A recomputation waits for the same message as its backward task. `devices[j]` is the device of stage j. The
    order of `ops` in a queue has no meaning. Raises ProblemError for an unknown rule, for "in_order" and for a limit
    below 1.
    """
    rules = [name for name in RULES if name != "in_order"]
    if rule not in rules:
        raise ProblemError(Problem("rule", rule, f"is none of {', '.join(rules)}", ({"rule": "fifo"},)))
    if limit is not None and limit < 1:
        message = "lets no micro-batch in, it must be at least 1"
        raise ProblemError(Problem("limit", limit, message, ({"limit": len(devices)},)))
    forwards = [Op(j, "F", i) for i in range(micro_batches) for j in range(len(devices))]
    backwards = [
        op
        for i in range(micro_batches)
        for j in reversed(range(len(devices)))
        for op in backward(j, i, micro_batches, recompute)
    ]
    queues = collect_queues(with_messages([forwards, backwards], devices, transfers), rule)
    return Schedule(queues, tuple(devices), limit=limit)
