"""What is wrong with the actions of a schedule file, before anything executes them.

    0F0,0B0,0F1,0B1     never ends: 1B0 (row 2, column 3) waits for 1F1 (row 2, column 2), which waits for 0F1
    1F0,1F1,1B0,1B1     (row 1, column 3), which waits for 0B0 (row 1, column 2), which waits for 1B0

Messages of a file are used where all are there. They are added otherwise: sent after the pass that makes them, received
before the pass that needs them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from harness.core.op import Op
from harness.core.problem import Problem
from harness.schedule import QueueOps, Schedule, validate
from harness.schedule.action_file import KEY, MESSAGES, PASSES, Action, Actions, Place, shortened

LISTED = 12
"""The most actions of a cycle that are named."""
Pass = tuple[int, int | None]
"""Stage and micro-batch."""
CarriedKind = Literal["send", "recv"]


def problems(
    actions: Actions, name: str, ranks: int | None = None, micro_batches: int | None = None, blocking: bool = False
) -> list[Problem]:
    """Check actions: each pass once, on one rank, with its counterparts, in an order that ends.

    `ranks` and `micro_batches` are those of the run, where they are known. With `blocking` a rank waits in each of its
    messages for the other end (`cluster.blocking_messages`). At most eight problems of a kind are listed.
    """
    found = [
        *other_size(actions, name, ranks, micro_batches),
        *shortened(_idle(actions, name)),
        *shortened(_twice(actions, name)),
        *shortened(_elsewhere(actions, name)),
        *shortened(_missing(actions, name)),
        *shortened(_unpaired_messages(actions, name)),
        *shortened(_own_order(actions, name)),
    ]
    return found or [*_deadlock(actions, name, blocking)]


def of_read_cells(actions: Actions, name: str, ranks: int | None = None) -> list[Problem]:
    """Check what cells say of which others are no actions (`action_file.Unread`): all that does not ask for more."""
    return [
        *other_size(actions, name, ranks, None),
        *shortened(_twice(actions, name)),
        *shortened(_elsewhere(actions, name)),
        *shortened(_own_order(actions, name)),
    ]


def problem(name: str, message: str, hint: str) -> Problem:
    """Return a problem of a schedule file."""
    return Problem(KEY, name, message, hint=hint)


def other_size(actions: Actions, name: str, ranks: int | None, micro_batches: int | None) -> Iterator[Problem]:
    """Yield that a file has other numbers of ranks or micro-batches than a run, where these are known."""
    rows, count = len(actions.rows), actions.micro_batches
    if ranks is not None and rows != ranks:
        message = f"has {rows} row{'s' * (rows != 1)}, the pipeline has {ranks} device{'s' * (ranks != 1)}"
        yield Problem(KEY, name, message, ({"mesh.pipeline": rows},), "a row for each device")
    if micro_batches is not None and count != micro_batches:
        message = f"has {count} micro-batch{'es' * (count != 1)}, the run has {micro_batches}"
        yield Problem(KEY, name, message, ({"batch.micro_batches": count},) if count else ())


def _idle(actions: Actions, name: str) -> Iterator[Problem]:
    """Yield ranks without passes."""
    for rank in range(len(actions.rows)):
        if not any(action.kind in PASSES for action in actions.of_rank(rank)):
            yield problem(name, f"row {rank + 1}: has no pass", "a row for each rank, with passes of a stage")


def _twice(actions: Actions, name: str) -> Iterator[Problem]:
    places: dict[Action, list[Place]] = defaultdict(list)
    for action, place in actions.placed():
        if action.micro_batch is not None:
            places[action].append(place)
    for action, found in places.items():
        if len(found) > 1:
            yield problem(name, f"{found[1]}: {action} stands at {found[0]}, too", "each action once")


def _elsewhere(actions: Actions, name: str) -> Iterator[Problem]:
    """Yield stages that two ranks run."""
    first: dict[int, tuple[Action, Place]] = {}
    wrong: set[tuple[int, int]] = set()
    for action, place in actions.placed():
        other, home = first.setdefault(action.stage, (action, place))
        if place.row != home.row and (action.stage, place.row) not in wrong:
            wrong.add((action.stage, place.row))
            message = f"{place}: {action} is of stage {action.stage}, which runs in row {home.row} ({other}, {home})"
            yield problem(name, message, "a stage in one row")


def _missing(actions: Actions, name: str) -> Iterator[Problem]:
    """Yield stages without passes, passes that are missing, and two backward passes of the same micro-batch."""
    kinds: dict[Pass, dict[str, Place]] = defaultdict(dict)
    for action, place in actions.placed():
        if action.kind in PASSES:
            kinds[action.stage, action.micro_batch].setdefault(action.kind, place)
    named = {action.stage: (action, place) for action, place in actions.placed()}
    present = {stage for stage, _ in kinds}
    forward = [i for (_, i), there in kinds.items() if "F" in there and i is not None]
    micro_batches = 1 + max(forward, default=actions.micro_batches - 1)
    for (stage, i), there in kinds.items():
        if (
            i is not None and i >= micro_batches
        ):  # a number that is no other's is wrong itself, rather than all that lack it
            kind, place = next(iter(there.items()))
            yield problem(
                name, f"{place}: {stage}{kind}{i} has no {stage}F{i}, nor has any stage", "a forward pass of it"
            )
    for stage in range(1 + max(named, default=-1)):
        if stage not in present:
            other, place = named.get(stage) or named[max(named)]
            yield problem(name, f"has no pass of stage {stage}, but {other} ({place})", "stages from 0 on")
            continue
        for i in range(micro_batches):
            there = kinds.get((stage, i), {})
            message = _fault(f"{stage}{{}}{i}", {*there})
            if message:
                said = [there[kind] for kind in ("B", "I", "W", "F") if kind in there]
                where = next(map(str, said), f"row {named[stage][1].row}")
                yield problem(name, f"{where}: {message}", "F and B, or F, I and W, of each stage and micro-batch")


def _fault(named: str, kinds: set[str]) -> str | None:
    """Say what is wrong with the passes of a stage and micro-batch: `named` is "2{}0"."""
    forward, whole, inputs, weights = (named.format(kind) for kind in ("F", "B", "I", "W"))
    if not kinds:
        return f"has neither {forward} nor {whole}"
    if "F" not in kinds:
        return f"has no {forward}"
    if "B" in kinds and kinds & {"I", "W"}:
        half = inputs if "I" in kinds else weights
        return f"has {whole} and {half}: a backward pass is whole, or comes in halves"
    if "I" in kinds and "W" not in kinds:
        return f"has {inputs}, but no {weights}"
    if "W" in kinds and "I" not in kinds:
        return f"has {weights}, but no {inputs}"
    return None if kinds & {"B", "I"} else f"has {forward}, but neither {whole} nor {inputs}"


def _unpaired_messages(actions: Actions, name: str) -> Iterator[Problem]:
    """Yield messages without their other end, and those that are missing among the messages of a file."""
    messages = {action: place for action, place in actions.placed() if action.kind in MESSAGES}
    if not messages:
        return
    passes = {action.stage: place.row for action, place in actions.placed() if action.kind in PASSES}
    for action, place in messages.items():
        other = other_end(action)
        if other.stage < 0 or other.stage not in passes:
            yield problem(name, f"{place}: {action} has no stage at its other end", "leave it out")
        elif passes[other.stage] == place.row:
            yield problem(name, f"{place}: {action} stays on its rank", "leave it out")
        elif other not in messages:
            yield problem(name, f"{place}: {action} has no {other}", f"add {other}, or leave out all messages")
    for action, place in actions.placed():
        for needed in _needed(action, passes):
            if needed not in messages:
                hint = f"add {needed}, or leave out all messages"
                yield problem(name, f"{place}: {action} has no {needed}", hint)


def other_end(message: Action) -> Action:
    """Return the receive of a send, the send of a receive."""
    up = message.kind in ("SEND_F", "RECV_B")
    kind = message.kind.replace("SEND", "x").replace("RECV", "SEND").replace("x", "RECV")
    return Action(message.stage + (1 if up else -1), kind, message.micro_batch)


def _needed(action: Action, row_of: dict[int, int]) -> Iterator[Action]:
    """Yield the messages of a pass: what it receives, then what it sends."""
    stage, i = action.stage, action.micro_batch
    before, after = (row_of.get(stage) != row_of[near] if near in row_of else False for near in (stage - 1, stage + 1))
    if action.kind == "F":
        yield from [Action(stage, "RECV_F", i)] * before
        yield from [Action(stage, "SEND_F", i)] * after
    elif action.kind in ("B", "I"):
        yield from [Action(stage, "RECV_B", i)] * after
        yield from [Action(stage, "SEND_B", i)] * before


def _deadlock(actions: Actions, name: str, blocking: bool) -> Iterator[Problem]:
    """Yield a cycle of actions that wait for each other, of ranks whose own order is right."""
    ops, places = _with_messages(actions, blocking)
    rows = tuple(QueueOps(rank, "compute", tuple(row)) for rank, row in enumerate(ops))
    found = validate.cycle(Schedule(rows, actions.placement, rendezvous=blocking))
    if found:
        cycle = [op for op in found[0] if op is not None]
        waits = _sentence(cycle, places)
        how = " where messages block" if blocking else ""
        yield problem(name, f"never ends{how}: {waits}", f"another order in {_rows(cycle, places)}")


def _own_order(actions: Actions, name: str) -> Iterator[Problem]:
    """Yield actions that stand before what they need in the same row."""
    places: dict[Action, Place] = {}
    for action, place in actions.placed():
        if action.micro_batch is not None:
            places.setdefault(action, place)
    for action, place in places.items():
        stage, i = action.stage, action.micro_batch
        earlier = {
            "B": ("F", "R", "RECV_B"),
            "I": ("F", "R", "RECV_B"),
            "R": ("F",),
            "W": ("I",),
            "F": ("RECV_F",),
            "SEND_F": ("F",),
            "SEND_B": ("B", "I"),
        }
        for kind in earlier.get(action.kind, ()):
            needed = Action(stage, kind, i)
            if needed in places and places[needed].column > place.column:
                yield problem(name, f"{place}: {action} comes before {needed} ({places[needed]})", f"{needed} first")


def _with_messages(actions: Actions, blocking: bool) -> tuple[list[list[Op]], dict[Op, tuple[Action, Place]]]:
    """Return the ops of each rank with messages, and the action that each comes from.

    Sends go where the file has them, else after their pass. A receive counts where messages block only: otherwise it
    is the pass that waits.
    """
    given = any(action.kind in MESSAGES for action, _ in actions.placed())
    row_of = {action.stage: place.row for action, place in actions.placed() if action.kind in PASSES}
    rows: list[list[Op]] = [[] for _ in actions.rows]
    origin: dict[Op, tuple[Action, Place]] = {}
    for action, place in actions.placed():
        around = [] if given else list(_needed(action, row_of))
        listed = [one for one in around if "RECV" in one.kind]
        listed += [action] if action.kind in (*PASSES, *MESSAGES) else []
        listed += [one for one in around if "SEND" in one.kind]
        for one in listed:
            if blocking or "RECV" not in one.kind:
                op = _op(one)
                rows[place.row - 1].append(op)
                origin[op] = (one, place)
    return rows, origin


def _op(action: Action) -> Op:
    if action.kind not in MESSAGES:
        return action.op
    kind: CarriedKind = "send" if action.kind.startswith("SEND") else "recv"
    return Op(action.stage, kind, action.micro_batch, peer=other_end(action).stage)


def _sentence(cycle: Sequence[Op], origin: dict[Op, tuple[Action, Place]]) -> str:
    """Say a cycle as a sentence, from an action to the one that it waits for, and so on until the first one."""
    names = [_named(op, origin) for op in reversed(cycle)]
    short = list(names)
    if len(short) > LISTED:
        short[LISTED // 2 : -LISTED // 2] = [f"({len(names) - LISTED} more)"]
    first, *others, last = [*short, names[0].partition(" (")[0]]
    return f"{first} waits for " + ", which waits for ".join([*others, last])


def _named(op: Op, origin: dict[Op, tuple[Action, Place]]) -> str:
    """Name an op by its action and place; a rendezvous is found at one of its ends."""
    if op not in origin and op.kind == "send" and op.peer is not None:
        op = replace(op, stage=op.peer, kind="recv", peer=op.stage)
    action, place = origin[op]
    return f"{action} ({place})"


def _rows(cycle: Sequence[Op], origin: dict[Op, tuple[Action, Place]]) -> str:
    rows = Counter(origin[op][1].row for op in cycle if op in origin)
    return " or ".join(f"row {row}" for row in sorted(rows))
