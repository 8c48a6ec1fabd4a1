"""A pipeline driven by messages: stages in the middle run what has arrived, by a policy (Myelin, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.core.op import Op
from harness.core.problem import Problem, ProblemError
from harness.schedule import Schedule, collect_queues
from harness.schedule.builders.one_f_one_b import backward, check_one_stage_each
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
    """Returns a pipeline in which messages decide what runs.

    limit=2 m=4 n=3                             limit 2: two forward tasks, then one after each backward task
    device 0   0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3  the first stage sends the next micro-batch in at once
    device 1   by `rule` (harness.schedule.policy) among the tasks whose message has arrived
    device 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  the last stage goes back at once

    So at most `limit` micro-batches are in the pipeline. The first and the last stage have no choice; each waits for
    its messages. Where a forward message and a gradient arrive at the same moment, the gradient is first under "fifo".
    A recomputation waits for the same message as its backward task. `devices[j]` is the device of stage j. The order of
    `ops` in a queue with a rule has no meaning. Raises ProblemError for an unknown rule, for "in_order", for a limit
    below 1 and for two stages on one device.
    """
    rules = [name for name in RULES if name != "in_order"]
    if rule not in rules:
        raise ProblemError(Problem("rule", rule, f"is none of {', '.join(rules)}", ({"rule": "fifo"},)))
    if limit is not None and limit < 1:
        message = "lets no micro-batch in, it must be at least 1"
        raise ProblemError(Problem("limit", limit, message, ({"limit": len(devices)},)))
    check_one_stage_each(devices, "message_driven")
    n = len(devices)
    in_flight = [limit or micro_batches, *[micro_batches] * (n - 2), 1][-n:]
    tasks = [_in_turns(j, micro_batches, most, recompute) for j, most in enumerate(in_flight)]
    queues = collect_queues(with_messages(tasks, devices, transfers), rule)
    fixed = {devices[0], devices[-1]}
    return Schedule(
        tuple(replace(q, rule="in_order") if q.name == "compute" and q.device in fixed else q for q in queues),
        tuple(devices),
        limit=limit,
    )


def _in_turns(stage: int, micro_batches: int, in_flight: int, recompute: str) -> list[Op]:
    """Returns the tasks of a stage that runs `in_flight` forward tasks, then another one after each backward task."""
    order = [Op(stage, "F", i) for i in range(min(in_flight, micro_batches))]
    for i in range(micro_batches):
        order += backward(stage, i, micro_batches, recompute)
        order += [Op(stage, "F", i + in_flight)] if i + in_flight < micro_batches else []
    return order
