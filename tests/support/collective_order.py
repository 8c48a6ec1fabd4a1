"""Would the calls of a step end on NCCL? What all ranks called, recorded on gloo, executed as NCCL would execute it.

NCCL has no tags and keeps the calls of a communicator in their order, on each rank:

* a collective ends when all members have come to it, and all must come to the same one;
* a message ends when both ends have come to it. A pair of ranks has a communicator of its own for both directions, but
  for `batch_isend_irecv`, whose messages run together in the communicator of the group.

    rank 0   send to 1 | receive from 1        each waits until the other receives: neither ever does
    rank 1   send to 0 | receive from 0

What a thread calls after a wait (`Work.wait`, or a call that blocks) begins when what it waited for has ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Line = tuple[str, str, int, int]
"""A communicator as one rank sees it: what it is, its group, and the two ranks of a pair (else -1)."""


@dataclass(frozen=True)
class Call:
    """A collective, or one end of a message to or from the rank `peer`. `members` are the ranks of its group.

    `what` is what all ends have in common: the name of a collective, the bytes and the dtype. Calls with the same
    `batch` were made by one `batch_isend_irecv`.
    """

    kind: Literal["collective", "send", "receive"]
    group: str
    members: tuple[int, ...]
    what: str
    peer: int = -1
    tag: int = 0
    batch: int | None = None

    def __str__(self) -> str:
        where = {"collective": f"of ranks {self.members}", "send": f"to {self.peer}", "receive": f"from {self.peer}"}
        return f"{self.what} {where[self.kind]}" if self.kind == "collective" else f"{self.kind} {where[self.kind]}"


@dataclass(frozen=True)
class Event:
    """A thread made the call `number` of its rank, or waited for it: then `call` is None."""

    thread: str
    number: int
    call: Call | None = None


Log = list[Event]


def faults(logs: Sequence[Log]) -> list[str]:
    """Returns what would not end, or be mixed up, on NCCL; `logs[r]` are the events of rank r in their order."""
    return [*_different_collectives(logs), *_different_messages(logs)] or _standstill(logs)


def _calls(log: Log) -> Iterator[Call]:
    return (event.call for event in log if event.call)


def _different_collectives(logs: Sequence[Log]) -> Iterator[str]:
    """Members of a communicator that do not call the same collectives in the same order."""
    made: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, log in enumerate(logs):
        for call in _calls(log):
            if call.kind == "collective":
                made[call.group][rank].append(call)
    for group, of_ranks in made.items():
        members = next(iter(of_ranks.values()))[0].members
        first = of_ranks[members[0]]
        for rank in members[1:]:
            other = of_ranks[rank]
            for place, (one, two) in enumerate(zip(first, other, strict=False)):
                if one.what != two.what:
                    yield f"group {group}, collective {place}: rank {members[0]} has {one.what}, rank {rank} {two.what}"
                    break
            else:
                if len(first) != len(other):
                    yield f"group {group}: rank {members[0]} has {len(first)} collectives, rank {rank} {len(other)}"


def _different_messages(logs: Sequence[Log]) -> Iterator[str]:
    """Messages of one direction of a communicator whose ends differ: in number, in size, or in their tags' order."""
    ends: dict[tuple[Line, int], tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
    for rank, log in enumerate(logs):
        for call in _calls(log):
            if call.kind != "collective":
                source = rank if call.kind == "send" else call.peer
                ends[_line(rank, call), source][call.kind == "receive"].append(call)
    for (line, source), (sent, received) in ends.items():
        pair = next(iter((*sent, *received)))
        where = f"group {line[1]}, messages of rank {source} with {pair.peer}"
        if len(sent) != len(received):
            yield f"{where}: {len(sent)} are sent, {len(received)} received"
        for place, (one, two) in enumerate(zip(sent, received, strict=False)):
            if (one.what, one.tag) != (two.what, two.tag):
                yield f"{where}: number {place} is {one.what} (tag {one.tag}), received as {two.what} (tag {two.tag})"
                break


def _line(rank: int, call: Call) -> Line:
    if call.kind == "collective" or call.batch is not None:
        return ("group", call.group, -1, -1)
    return ("pair", call.group, min(rank, call.peer), max(rank, call.peer))


@dataclass
class Unit:
    """What a communicator of a rank executes at a time: a call, or all of a batch.

    `numbers` are those of its calls in the log. `missing` are the calls that have not ended, each with its number among
    those of its line, kind and peer: the two ends of a message have the same one.
    """

    line: Line
    numbers: list[int] = field(default_factory=list)
    missing: list[tuple[Call, int]] = field(default_factory=list)


class Execution:
    """All ranks: each thread issues its calls in order and stops at a wait; each line executes its first unit."""

    def __init__(self, logs: Sequence[Log]) -> None:
        self.lines: list[dict[Line, deque[Unit]]] = [defaultdict(deque) for _ in logs]
        self.units: list[dict[int, Unit]] = [{} for _ in logs]
        self.threads = [_by_thread(log) for log in logs]
        for rank, log in enumerate(logs):
            self._number(rank, log)
        self.issued: list[set[int]] = [set() for _ in logs]

    def _number(self, rank: int, log: Log) -> None:
        """Makes the units of a rank."""
        counts: Counter[tuple[Line, str, int]] = Counter()
        batches: dict[int, Unit] = {}
        for event in log:
            if event.call is None:
                continue
            call, line = event.call, _line(rank, event.call)
            key = (line, call.kind, call.peer)
            unit = batches.get(call.batch) if call.batch is not None else None
            if unit is None:
                unit = Unit(line)
                self.lines[rank][line].append(unit)
                if call.batch is not None:
                    batches[call.batch] = unit
            unit.numbers.append(event.number)
            unit.missing.append((call, counts[key]))
            counts[key] += 1
            self.units[rank][event.number] = unit

    def run(self) -> None:
        """Until nothing more can happen."""
        moved = True
        while moved:
            issued = [self._issue(rank) for rank in range(len(self.threads))]
            moved = self._execute() or any(issued)

    def _issue(self, rank: int) -> bool:
        """Lets the threads of a rank go on to the first wait for what has not ended."""
        moved = False
        for events in self.threads[rank].values():
            while events and (events[0].call or not self._pending(rank, events[0].number)):
                event = events.popleft()
                if event.call:
                    self.issued[rank].add(event.number)
                moved = True
        return moved

    def _pending(self, rank: int, number: int) -> bool:
        return bool(number in self.units[rank] and self.units[rank][number].missing)

    def _execute(self) -> bool:
        """Ends the calls all of whose ends are at the head of their lines; whether there were any."""
        there: Counter[tuple[object, ...]] = Counter()
        active = [
            (unit, entry, _rendezvous(rank, unit.line, *entry))
            for rank, unit in self._heads()
            for entry in unit.missing
        ]
        for *_, rendezvous in active:
            there[rendezvous] += 1
        ended = [(unit, entry) for unit, entry, rendezvous in active if there[rendezvous] == _ends(entry[0])]
        for unit, entry in ended:
            unit.missing.remove(entry)
        for lines in self.lines:
            for line in lines.values():
                while line and not line[0].missing:
                    line.popleft()
        return bool(ended)

    def _heads(self) -> Iterator[tuple[int, Unit]]:
        """The first unit of each line of each rank, if it has been issued."""
        for rank, lines in enumerate(self.lines):
            for line in lines.values():
                if line and self.issued[rank].issuperset(line[0].numbers):
                    yield rank, line[0]

    def waiting(self) -> list[str]:
        """For each rank, the calls at which it stands."""
        found = []
        for rank, lines in enumerate(self.lines):
            stand = [str(line[0].missing[0][0]) for line in lines.values() if line]
            if stand:
                found.append(f"rank {rank} stands at: {'; '.join(stand)}")
        return found


def _rendezvous(rank: int, line: Line, call: Call, number: int) -> tuple[object, ...]:
    """What both ends of a message, or all members of a collective, have in common."""
    if call.kind == "collective":
        return (line, number)
    ends = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
    return (line, *ends, number)


def _ends(call: Call) -> int:
    return len(call.members) if call.kind == "collective" else 2


def _by_thread(log: Iterable[Event]) -> dict[str, deque[Event]]:
    found: dict[str, deque[Event]] = defaultdict(deque)
    for event in log:
        found[event.thread].append(event)
    return found


def _standstill(logs: Sequence[Log]) -> list[str]:
    execution = Execution(logs)
    execution.run()
    return execution.waiting()
