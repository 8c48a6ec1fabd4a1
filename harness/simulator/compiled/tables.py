"""What the compiled event loop executes: `harness.simulator.event_loop.Work` as arrays, which any lowering can make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.core.op import Op
from harness.schedule.policy import RULES
from harness.simulator.event_loop import Work

Numbers = NDArray[np.int64]
Seconds = NDArray[np.float64]
Flags = NDArray[np.bool_]
NO_RULE = -1
"""Rules are numbers: their places in `RULES`, or this one."""


class Tables(NamedTuple):
    """The nodes to execute. `after[after_at[k] : after_at[k + 1]]` are the nodes that follow node k, in order; `needs`
    are likewise the resources that it occupies, `owner` the node of each of these. `backward` is of a recomputation the
    node of its backward task, else -1.

    `flow` is the number of a node's flow, else -1; flows are in the order of their nodes. Flow k has an `amount` and a
    `cap`, and crosses `uses[uses_at[k] : uses_at[k + 1]]`, places in `capacity` and `alone` (0 where there is none),
    each so many `times`.
    """

    seconds: Seconds
    before: Numbers
    after_at: Numbers
    after: Numbers
    needs_at: Numbers
    needs: Numbers
    owner: Numbers
    urgent: Flags
    forward: Flags
    backward: Numbers
    rules: Numbers
    flow: Numbers
    amount: Seconds
    cap: Seconds
    uses_at: Numbers
    uses: Numbers
    times: Seconds
    capacity: Seconds
    alone: Seconds

    def without_flows(self, seconds: Seconds) -> Tables:
        """Returns the same nodes, which take these seconds and share nothing."""
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
        return self._replace(
            seconds=seconds,
            flow=np.full(len(seconds), -1, dtype=np.int64),
            amount=nothing,
            cap=nothing,
            uses_at=np.zeros(1, dtype=np.int64),
            uses=none,
            times=nothing,
        )


def numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, dtype=np.int64)


def joined(lists: Sequence[Sequence[int]]) -> tuple[Numbers, Numbers]:
    """Returns where each of the lists begins, and all of them as one array."""
    at = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, lists), dtype=np.int64, count=len(lists)), out=at[1:])
    return at, numbers(chain.from_iterable(lists))


def tables_of(work: Work, ops: Sequence[Op]) -> Tables:
    """Returns the arrays of lowered work; `ops` are those of its first nodes, the others have none."""
    count = len(work.seconds)
    after_at, after = joined(work.after)
    needs_at, needs = joined([work.needs.get(node, ()) for node in range(count)])
    urgent, forward = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    urgent[list(work.urgent)] = True
    forward[: len(ops)] = np.fromiter((op.forward for op in ops), dtype=np.bool_, count=len(ops))
    rules = np.full(max([int(needs.max(initial=-1)), *work.rules]) + 1, NO_RULE, dtype=np.int64)
    for resource, rule in work.rules.items():
        rules[resource] = RULES.index(rule)
    shared = {resource: place for place, resource in enumerate(work.capacity)}
    flows = [work.flows[node] for node in sorted(work.flows)]
    flow_of = np.full(count, -1, dtype=np.int64)
    flow_of[sorted(work.flows)] = np.arange(len(flows))
    uses_at, uses = joined([[shared[name] for name in flow.uses] for flow in flows])
    return Tables(
        seconds=np.array(work.seconds, dtype=np.float64),
        before=np.array(work.before, dtype=np.int64),
        after_at=after_at,
        after=after,
        needs_at=needs_at,
        needs=needs,
        owner=np.repeat(np.arange(count, dtype=np.int64), np.diff(needs_at)),
        urgent=urgent,
        forward=forward,
        backward=_backward(work, ops),
        rules=rules,
        flow=flow_of,
        amount=np.array([flow.amount for flow in flows], dtype=np.float64),
        cap=np.array([flow.cap for flow in flows], dtype=np.float64),
        uses_at=uses_at,
        uses=uses,
        times=np.array([times for flow in flows for times in flow.uses.values()], dtype=np.float64),
        capacity=np.array(list(work.capacity.values()), dtype=np.float64),
        alone=np.array([work.alone.get(name, 0.0) for name in work.capacity], dtype=np.float64),
    )


def _backward(work: Work, ops: Sequence[Op]) -> Numbers:
    found = np.full(len(work.seconds), -1, dtype=np.int64)
    if work.rules:
        nodes = {(op.stage, op.micro_batch): node for node, op in enumerate(ops) if op.kind == "B"}
        for node, op in enumerate(ops):
            if op.kind == "R":
                found[node] = nodes.get((op.stage, op.micro_batch), -1)
    return found


def sliced(at: Numbers, values: Numbers, which: Numbers) -> tuple[Numbers, Numbers]:
    """Of lists that `joined` made returns those of `which`, one after the other: the place in `which` of each value,
    and the values."""
    lengths = np.diff(at)[which]
    owner = np.repeat(np.arange(len(which)), lengths)
    begins = np.cumsum(lengths) - lengths
    return owner, values[at[:-1][which][owner] + np.arange(len(owner)) - begins[owner]]
