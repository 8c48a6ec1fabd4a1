"""Validates a schedule as data, before anything executes it: structure, and cycles of ops that wait for each other."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.problem import Problem
from harness.schedule import QueueOps, Schedule
from harness.schedule.dependency_graph import MESSAGES, Graph, chains
from harness.schedule.optimizer_chunks import IN, OUT, copy_direction

SHOWN = 12
"""A longer cycle is shortened in the middle."""


def find_cycle(schedule: Schedule) -> list[Problem]:
    """Finds ops that wait for each other: a problem that names the ops of one `cycle`, or an empty list."""
    if not (found := cycle(schedule)):
        return []
    ops, queues = found
    names = ["all outputs" if op is None else str(op) for op in ops]
    if len(names) > SHOWN:
        names[SHOWN // 2 : -SHOWN // 2] = [f"({len(names) - SHOWN} more)"]
    hint = f"another order in {' or '.join(queues)}" if queues else "a limit of at least 1"
    message = f"waits for itself: {' -> '.join([*names, names[0]])}"
    return [op_problem(next(op for op in ops if op is not None), message, hint)]


def cycle(schedule: Schedule) -> tuple[list[Op | None], list[str]] | None:
    """Returns ops that wait for each other, each before the one that waits for it (None: all outputs), and the queues
    whose order is a part of it; None if there are none.

    An op waits for the ops that it depends on, and for the previous one in a queue with a fixed order. Raises
    ValueError for an op that is listed twice in one queue.
    """
    graph = schedule.graph
    orders = [c for queue, nodes in zip(schedule.queues, graph.queues, strict=True) for c in chains(queue, nodes)]
    stuck = _stuck(graph, orders)
    if not stuck:
        return None
    before = {node: [node_before for node_before in graph.before[node] if node_before in stuck] for node in stuck}
    for node_before, following in (step for order in orders for step in pairwise(order)):
        if node_before in stuck and following in stuck:
            before[following].append(node_before)
    nodes = _shortest(_node_of_cycle(before), before)
    return [None if node == graph.barrier else graph.ops[node] for node in nodes], _queues(schedule, graph, nodes)


def op_problem(op: Op, message: str, hint: str, **numbers: float) -> Problem:
    """Returns a problem of an op, named with its stage; `numbers` are those of the message."""
    return Problem(f"{op} of stage {op.stage}", None, message, hint=hint, numbers=numbers)


def _stuck(graph: Graph, orders: Sequence[Sequence[int]]) -> set[int]:
    """Returns the nodes that never start: in a cycle or after one."""
    after: list[list[int]] = [[] for _ in graph.before]
    missing = [len(nodes) for nodes in graph.before]
    for node, nodes in enumerate(graph.before):
        for dependency in nodes:
            after[dependency].append(node)
    for dependency, following in (step for order in orders for step in pairwise(order)):
        after[dependency].append(following)
        missing[following] += 1
    ready = [node for node, count in enumerate(missing) if not count]
    while ready:
        for node in after[ready.pop()]:
            missing[node] -= 1
            if not missing[node]:
                ready.append(node)
    return {node for node, count in enumerate(missing) if count}


def _node_of_cycle(before: Mapping[int, Sequence[int]]) -> int:
    """Returns a node of a cycle: each step goes from a node to one that it waits for."""
    node, seen = min(before), set()
    while node not in seen:
        seen.add(node)
        node = before[node][0]
    return node


def _shortest(start: int, before: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns the shortest cycle through `start`, each node before the one that waits for it."""
    towards: dict[int, int] = {}
    queue = deque([start])
    while start not in towards:
        node = queue.popleft()
        for dependency in before[node]:
            if dependency not in towards:
                towards[dependency] = node
                queue.append(dependency)
    nodes = [start]
    while towards[nodes[-1]] != start:
        nodes.append(towards[nodes[-1]])
    return nodes


def _queues(schedule: Schedule, graph: Graph, nodes: list[int]) -> list[str]:
    """Names the queues whose order is a part of the cycle."""
    steps = set(pairwise([*nodes, nodes[0]]))
    return [
        f"device {queue.device} {queue.name}"
        for queue, queue_nodes in zip(schedule.queues, graph.queues, strict=True)
        if any(
            step in steps and step[0] not in graph.before[step[1]]
            for c in chains(queue, queue_nodes)
            for step in pairwise(c)
        )
    ]


Tasks = dict[tuple[int, int | None], Op]
"""Ops of one kind, by stage and micro-batch."""


def validation_errors(schedule: Schedule, plan: Plan | None = None) -> list[Problem]:
    """Checks the structure of a schedule; returns a problem for each fault, with the op, its stage and a hint.

    It finds ops that are listed twice, on another stage's device, or belong to no stage; tasks without their
    counterpart, their micro-batch or what they need; messages without another end; buckets that are never updated;
    ops that wait for each other in a cycle. A `plan` gives the stages, devices and micro-batches that the schedule must
    have. A missing optimizer step is allowed. Takes time linear in the number of ops.
    """
    stages = len(schedule.devices)
    invalid = {op: problem for queue in schedule.queues for op in queue.ops if (problem := _invalid_op(op, stages))}
    if invalid:
        kept = (replace(queue, ops=tuple(op for op in queue.ops if op not in invalid)) for queue in schedule.queues)
        schedule = replace(schedule, queues=tuple(kept))
    duplicates = list(_duplicates(schedule))
    problems = [*_differences_from_plan(schedule, plan), *invalid.values(), *duplicates, *_misplaced(schedule)]
    problems += [*_unpaired(schedule, plan), *_unsent(schedule), *_not_updated(schedule)]
    return problems if duplicates else [*problems, *find_cycle(schedule)]


def _where(queue: QueueOps) -> str:
    return f"device {queue.device} {queue.name}"


def _invalid_op(op: Op, stages: int) -> Problem | None:
    """Returns a problem for an op of no stage, a task of no micro-batch, a message without a receiver."""
    if not 0 <= op.stage < stages:
        return op_problem(op, f"is of none of the {stages} stages", f"a stage of 0..{stages - 1}")
    if op.kind in ("F", "B", "R", "W") and op.micro_batch is None:
        return op_problem(op, "names no micro-batch", f"{op}0")
    if op.kind == "copy" and op.peer is None:
        return None  # to or from the host's memory
    if op.kind in MESSAGES and (op.peer is None or op.peer == op.stage or not 0 <= op.peer < stages):
        end = "names no other stage" if op.peer is None else f"has its other end on stage {op.peer}"
        return op_problem(op, end, f"another one of the stages 0..{stages - 1}")
    return None


def _differences_from_plan(schedule: Schedule, plan: Plan | None) -> Iterator[Problem]:
    if schedule.limit is not None and schedule.limit < 1:
        yield Problem(f"limit {schedule.limit}", None, "lets no micro-batch in", hint="1 or more")
    devices = schedule.devices
    planned = tuple(stage.device for stage in plan.stages) if plan else devices
    if len(planned) != len(devices):
        fix = {"mesh.pipeline": len(devices)}
        yield Problem("mesh.pipeline", len(planned), f"is not the {len(devices)} stages of the schedule", (fix,))
    for j, (device, planned_device) in enumerate(zip(devices, planned, strict=False)):
        if device != planned_device:
            message = f"is on device {device} in the schedule, on {planned_device} in the plan"
            yield Problem(f"stage {j}", None, message, hint=f"device {planned_device}")


def _duplicates(schedule: Schedule) -> Iterator[Problem]:
    """Yields ops that are listed twice. Only a copy may be in two queues: those of its two ends."""
    homes: dict[Op, QueueOps] = {}
    for queue in schedule.queues:
        ops = dict.fromkeys(queue.ops)
        if len(ops) < len(queue.ops):
            for op, times in Counter(queue.ops).items():
                if times > 1:
                    yield op_problem(op, f"stands {times} times in {_where(queue)}", "once")
        for op in ops:
            other = homes.setdefault(op, queue)
            if other is not queue and not (op.kind == "copy" and other.name == queue.name):
                yield op_problem(op, f"stands in {_where(other)} and in {_where(queue)}", "in one of them")


def _misplaced(schedule: Schedule) -> Iterator[Problem]:
    """Yields ops on a wrong device: each belongs to its stage's device; a copy in the compute queue occupies both ends'
    devices."""
    devices = schedule.devices
    held: dict[Op, set[int]] = {}
    for queue in schedule.queues:
        for op in queue.ops:
            homes = {devices[op.stage]}
            if op.kind == "copy" and op.peer is not None and queue.name == "compute":
                homes.add(devices[op.peer])
                held.setdefault(op, set()).add(queue.device)
            elif op.kind == "copy" and op.peer is not None and queue.name == "copy out":
                homes = {devices[op.peer]}
            if queue.device not in homes:
                right = " or ".join(f"device {device}" for device in sorted(homes))
                yield op_problem(op, f"stands in {_where(queue)}, but its stage is on {right}", right)
    for op, where in held.items():
        for device in {devices[op.stage], devices[op.peer or 0]} - where:
            yield op_problem(op, f"does not stand at its other end, device {device} compute", "add it there")


def _unpaired(schedule: Schedule, plan: Plan | None) -> Iterator[Problem]:
    """Yields F without B, B or R without F, W without B, and micro-batches that not all stages work on."""
    tasks: dict[str, Tasks] = {"F": {}, "B": {}, "R": {}, "W": {}}
    for queue in schedule.queues:
        for op in queue.ops:
            if op.kind in tasks:
                tasks[op.kind][op.stage, op.micro_batch] = op
    for kind, twin in (("F", "B"), ("B", "F"), ("R", "F"), ("W", "B")):
        for (j, i), op in tasks[kind].items():
            if (j, i) not in tasks[twin]:
                yield op_problem(op, f"has no {j}{twin}{i}", f"add {j}{twin}{i}, or leave out {op}")
    scheduled = {i for _, i in [*tasks["F"], *tasks["B"]] if i is not None}
    expected = set(range(plan.micro_batches)) if plan else scheduled
    for j in range(len(schedule.devices)):
        for i in sorted(expected):
            if (j, i) not in tasks["F"] and (j, i) not in tasks["B"]:
                hint = f"add micro-batch {i} to stage {j}"
                yield Problem(f"{j}F{i} and {j}B{i} of stage {j}", None, "are missing", hint=hint)
    for i in sorted(scheduled - expected):
        fix = {"batch.micro_batches": max(scheduled) + 1}
        yield Problem(f"micro-batch {i}", None, f"is none of the plan's {len(expected)}", (fix,))


def _unsent(schedule: Schedule) -> Iterator[Problem]:
    """Yields messages without another end: a copy of what no task makes, a recv without a send."""
    made = {
        (op.stage, op.kind, op.micro_batch) for queue in schedule.queues for op in queue.ops if op.kind in ("F", "B")
    }
    sent = (op for queue in schedule.queues for op in queue.ops if op.kind in MESSAGES and op.peer is not None)
    messages = dict.fromkeys(sent)
    for op in messages:
        source = op.stage if op.kind == "send" else op.peer
        if (source, "F" if op.forward else "B", op.micro_batch) not in made:
            what = f"{source}{'F' if op.forward else 'B'}{op.micro_batch}"
            yield op_problem(op, f"carries what {what} makes, which is missing", f"add {what}, or leave out {op}")
        if op.kind == "recv" and op.peer is not None:
            send = Op(op.peer, "send", op.micro_batch, op.part, op.stage)
            if send not in messages:
                yield op_problem(op, f"has no {send}", f"add {send}, or leave out {op}")


def _not_updated(schedule: Schedule) -> Iterator[Problem]:
    """Yields buckets that are copied to a device without a step there, or in one direction only."""
    every = (op for queue in schedule.queues for op in queue.ops)
    ops = dict.fromkeys(op for op in every if op.kind == "step" or (op.kind == "copy" and op.peer is None))
    for op in ops:
        bucket, direction = copy_direction(op)
        other = OUT if direction == IN else IN
        needed = (Op(op.stage, "step", None, bucket), replace(op, part=f"{bucket}/{other}")) if bucket else ()
        for missing in needed:
            if missing not in ops:
                yield op_problem(op, f"has no {missing}", f"add {missing}, or leave out {op}")
