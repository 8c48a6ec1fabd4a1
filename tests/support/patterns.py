"""Patterns of two stages, and random ones that are valid by construction: each op where its device or link is free."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from harness.core.cluster import Duplex
from harness.core.op import Op
from harness.core.pattern import Pattern, Placed


def placed(text: str, start_s: float, shift: int, device: int | None = None) -> Placed:
    """An op by its notation, on the device with its stage's number; messages have 100 bytes."""
    op = Op.parse(text)
    if op.kind == "copy":
        op = replace(op, queue="network", bytes=100)
    return Placed(op, op.stage if device is None else device, start_s, shift)


TWO = Pattern(3, (placed("0F0", 0, 0), placed("1F0", 1, 0), placed("1B0", 2, 0), placed("0B0", 1, 1)))
"""
period    |0     |3     |6
device 0  |0F 0B-|          0B of the micro-batch before
device 1  |-  1F  1B-       over the end of the period
"""
TWO_S = {"0F0": 1.0, "1F0": 1.0, "1B0": 2.0, "0B0": 2.0}

FAR = Pattern(3, (placed("0F0", 0, 0), placed("1copy0<0", 1, 0), placed("1F0", 2, 0), placed("1B0", 0, 1),
                  placed("0copy0<1", 2, 1), placed("0B0", 1, 2)))  # fmt: skip
"""The same with messages of a second in each direction: 0B is two periods late, not one."""
FAR_S = TWO_S | {"1copy0<0": 1.0, "0copy0<1": 1.0}


@dataclass(frozen=True)
class Chain:
    """Slots of each stage's tasks, and of the message into it in each direction (the first has none)."""

    devices: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    message: tuple[int, ...]
    duplex: Duplex = "half"

    def path(self) -> list[tuple[Op, int]]:
        """What a micro-batch does, one after the other, with the slots that it takes; bytes are slots."""
        there: list[tuple[Op, int]] = []
        back: list[tuple[Op, int]] = []
        for j, device in enumerate(self.devices):
            if j and self.devices[j - 1] != device:
                size = self.message[j]
                there.append((Op(j, "copy", 0, "", j - 1, bytes=size, queue="network"), size))
                back.append((Op(j - 1, "copy", 0, "", j, bytes=size, queue="network"), size))
            there.append((Op(j, "F", 0), self.forward[j]))
            back.append((Op(j, "B", 0), self.backward[j]))
        return there + back[::-1]

    def durations(self) -> dict[str, float]:
        return {str(op): float(slots) for op, slots in self.path()}

    def place(self, op: Op) -> tuple[int, ...]:
        """What an op needs alone."""
        if op.peer is None:
            return (self.devices[op.stage],)
        ends = (self.devices[op.peer], self.devices[op.stage])
        return tuple(sorted(ends)) if self.duplex == "half" else ends

    def loads(self) -> Counter[tuple[int, ...]]:
        """Slots of a period that each device and link is busy, if only their sum counts."""
        found: Counter[tuple[int, ...]] = Counter()
        for op, slots in self.path():
            found[self.place(op)] += slots
        return found


def pattern_of(chain: Chain, waits: list[int]) -> Pattern:
    """The shortest period, from the largest load on, in which every op finds room as soon as it can start.

    `waits[n]` are slots that op n of the path waits all the same.
    """
    period = max(chain.loads().values())
    while True:
        used: dict[tuple[int, ...], set[int]] = {}
        now, placed = 0, []
        for (op, slots), wait in zip(chain.path(), waits, strict=False):
            taken = used.setdefault(chain.place(op), set())
            starts = range(now + wait, now + wait + period)
            start = next((s for s in starts if not taken & {k % period for k in range(s, s + slots)}), None)
            if start is None:
                break
            taken |= {k % period for k in range(start, start + slots)}
            placed.append(Placed(op, chain.devices[op.stage], start % period, start // period))
            now = start + slots
        else:
            return Pattern(period, tuple(placed))
        period += 1


@st.composite
def patterns(draw: st.DrawFn, duplex: Duplex | None = None) -> tuple[Chain, Pattern]:
    """2 to 5 stages on 1 to 3 devices; a device may have several, also some that follow one another."""
    n, width = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    kind = duplex or draw(st.sampled_from(("half", "full")))

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)))

    chain = Chain(numbers(0, width - 1), numbers(1, 5), numbers(1, 8), numbers(1, 6), kind)
    waits = draw(st.lists(st.sampled_from((0, 0, 0, 1, 2)), min_size=4 * n, max_size=4 * n))
    return chain, pattern_of(chain, waits)
