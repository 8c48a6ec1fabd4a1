"""Which work on a GPU comes before which: streams with vector clocks, memory with all that was done to it.

    stream A   write x |record e|                      clock of A: {A: 1}
    stream B             |wait e| read x               clock of B: {A: 1, B: 1}: the read comes after the write

A fault is an access that could come before an earlier one which it conflicts with, or memory that is given back to the
stream that allocated it while another stream may still use it: the next allocation of that stream would overwrite it.
The host is one more stream, "host". What it launches comes after all that it has waited for; all its threads are one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Clock = dict[str, int]
HOST = "host"


@dataclass(frozen=True)
class Range:
    """Bytes `start` to `end` of a block of memory."""

    block: int
    start: int
    end: int

    def overlaps(self, other: Range) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class Access:
    """What the work number `stamp` of a stream did to a range."""

    where: Range
    stream: str
    stamp: int
    what: str
    write: bool


@dataclass
class Block:
    """Memory that the `stream` allocated; `recorded` are those that the allocator waits for."""

    stream: str
    accesses: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


class StreamOrder:
    """All streams of a machine."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {}
        self.blocks: dict[int, Block] = {}
        self.faults: list[str] = []

    def clock(self, stream: str) -> Clock:
        return self.clocks.setdefault(stream, {})

    def join(self, waiting: str, earlier: Clock) -> None:
        """What the stream does from now on comes after all that a clock has seen."""
        own = self.clock(waiting)
        for stream, stamp in earlier.items():
            own[stream] = max(own.get(stream, 0), stamp)

    def allocate(self, block: int, stream: str) -> None:
        self.blocks[block] = Block(stream)

    def launch(self, stream: str, what: str, reads: Iterable[Range] = (), writes: Iterable[Range] = ()) -> None:
        """A kernel on a stream. The host has launched it, and does what it does itself at once."""
        self.join(stream, self.clock(HOST))
        clock = self.clock(stream)
        stamp = clock[stream] = clock.get(stream, 0) + 1
        for write, ranges in (False, tuple(reads)), (True, tuple(writes)):
            for where in ranges:
                self._access(Access(where, stream, stamp, what, write))

    def _access(self, access: Access) -> None:
        block = self.blocks.setdefault(access.where.block, Block(access.stream))
        for earlier in block.accesses:
            conflict = (access.write or earlier.write) and access.where.overlaps(earlier.where)
            if conflict and not self._before(earlier, access.stream):
                self.faults.append(f"{_shown(access)} is not ordered after {_shown(earlier)}")
        if access.write:  # whatever comes after it comes after those, too
            block.accesses = [one for one in block.accesses if not _covers(access.where, one.where)]
        block.accesses.append(access)

    def _before(self, earlier: Access, stream: str) -> bool:
        return earlier.stream == stream or self.clock(stream).get(earlier.stream, 0) >= earlier.stamp

    def record(self, block: int, stream: str) -> None:
        """The allocator gives the block back only after what the stream has done until then."""
        self.blocks[block].recorded.add(stream)

    def free(self, block: int) -> None:
        """Nothing refers to the block any more: its stream may allocate it again at once."""
        gone = self.blocks.pop(block, None)
        if gone is None:
            return
        self.join(gone.stream, self.clock(HOST))
        for access in gone.accesses:
            if access.stream not in gone.recorded and not self._before(access, gone.stream):
                self.faults.append(f"memory of {gone.stream} is given back before {_shown(access)} has ended")


def _covers(outer: Range, inner: Range) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end


def _shown(access: Access) -> str:
    return f"{access.what} on {access.stream}, which {'writes' if access.write else 'reads'},"
