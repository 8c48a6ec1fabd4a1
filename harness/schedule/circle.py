"""Ops that wait for each other in a circle, so that none of them can ever start."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from harness.schedule import Schedule
from harness.schedule.graph import Graph, chains, graph

SHOWN = 12
"""A longer circle is shortened in the middle."""


def circle(schedule: Schedule) -> list[str]:
    """A line that names the ops of one circle, each before the one that waits for it; empty if there is none.

    What waits: an op for the ops that it depends on, and for the one before it in a queue with a fixed order. Raises
    ValueError for an op that stands twice in one lane.
    """
    found = graph(schedule)
    orders = [c for lane, nodes in zip(schedule.lanes, found.lanes, strict=True) for c in chains(lane, nodes)]
    stuck = _stuck(found, orders)
    if not stuck:
        return []
    before = {node: [one for one in found.before[node] if one in stuck] for node in stuck}
    for one, following in (step for order in orders for step in pairwise(order)):
        if one in stuck and following in stuck:
            before[following].append(one)
    nodes = _shortest(_inside(before), before)
    names = ["all outputs" if node == found.barrier else str(found.ops[node]) for node in nodes]
    if len(names) > SHOWN:
        names[SHOWN // 2 : -SHOWN // 2] = [f"({len(names) - SHOWN} more)"]
    first = next(node for node in nodes if node != found.barrier)
    op = found.ops[first]
    queues = " or ".join(_queues(schedule, found, nodes))
    mend = f"another order in {queues}" if queues else "a limit of at least 1"
    return [f"{op} of stage {op.stage}   waits for itself: {' -> '.join([*names, names[0]])}   -> {mend}"]


def _stuck(found: Graph, orders: Sequence[Sequence[int]]) -> set[int]:
    """The nodes that never start: in a circle or behind one."""
    after: list[list[int]] = [[] for _ in found.before]
    missing = [len(nodes) for nodes in found.before]
    for node, nodes in enumerate(found.before):
        for one in nodes:
            after[one].append(node)
    for one, following in (step for order in orders for step in pairwise(order)):
        after[one].append(following)
        missing[following] += 1
    ready = [node for node, count in enumerate(missing) if not count]
    while ready:
        for node in after[ready.pop()]:
            missing[node] -= 1
            if not missing[node]:
                ready.append(node)
    return {node for node, count in enumerate(missing) if count}


def _inside(before: Mapping[int, Sequence[int]]) -> int:
    """A node of a circle: who goes from waiting to waited for comes into one."""
    node, seen = min(before), set()
    while node not in seen:
        seen.add(node)
        node = before[node][0]
    return node


def _shortest(start: int, before: Mapping[int, Sequence[int]]) -> list[int]:
    """The shortest circle through `start`, each node before the one that waits for it."""
    towards: dict[int, int] = {}
    queue = deque([start])
    while start not in towards:
        node = queue.popleft()
        for one in before[node]:
            if one not in towards:
                towards[one] = node
                queue.append(one)
    nodes = [start]
    while towards[nodes[-1]] != start:
        nodes.append(towards[nodes[-1]])
    return nodes


def _queues(schedule: Schedule, found: Graph, nodes: list[int]) -> list[str]:
    """The queues whose order is a part of the circle."""
    steps = set(pairwise([*nodes, nodes[0]]))
    return [
        f"device {lane.device} {lane.queue}"
        for lane, own in zip(schedule.lanes, found.lanes, strict=True)
        if any(
            step in steps and step[0] not in found.before[step[1]] for c in chains(lane, own) for step in pairwise(c)
        )
    ]
