"""Blocks that a chain repeats, and that are all to be split alike ("identical split for repeated layers", AutoDDL).

    items      first  [a b] [a b] [a b]  last
    folded     first  Repeated((a, b), 3)  last

The blocks have the same strategies and lie alike: the stream enters each in one place E and leaves it in one place F.

    ... --> E a b F --> E a b F --> E a b F --> ...          n x block[E, F] + (n - 1) x move[F, E]

Where nothing moves between the blocks, E is F. If the input of the first product is free, so it is in the first block
only; then the first product of each of them stands where its block is entered, as it does there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from harness.sbp.chain import Item, Residual
from harness.sbp.route import Step, Steps


@dataclass(frozen=True)
class Repeated:
    """A block of items, `times` one after the other."""

    items: tuple[Item, ...]
    times: int

    def steps(self, block: Steps, between: Steps) -> Steps:
        """All that happens, from what happens in a block and between two; only in the first one an input is free."""
        again = [step._replace(free=False) if isinstance(step, Step) else step for step in block]
        return block + (between + again) * (self.times - 1)


Part = Item | Repeated | float
"""Of a chain that is searched: what is computed, or the elements of a tensor that is moved."""


def folded(items: Sequence[Item], alike: Callable[[Item], object]) -> tuple[Item | Repeated, ...]:
    """The items with their longest run of equal blocks as one.

    A run are at least two equal periods of items, one after the other; `alike` is equal for equal items. Of runs of as
    many items that with the shortest period is taken, of those the first.
    """
    numbers: dict[object, int] = {}
    keys = [numbers.setdefault(alike(item), len(numbers)) for item in items]
    best = max((run for period in range(1, len(keys) // 2 + 1) for run in _runs(keys, period)), default=None)
    if best is None:
        return tuple(items)
    length, period, begin = best[0], -best[1], -best[2]
    run = Repeated(tuple(items[begin : begin + period]), length // period)
    return (*items[:begin], run, *items[begin + length :])


def _runs(keys: Sequence[int], period: int) -> list[tuple[int, int, int]]:
    """(items, - period, - where it begins) of every run with this period."""
    found, begin = [], 0
    for same, group in groupby(one == other for one, other in zip(keys, keys[period:], strict=False)):
        count = len(list(group))
        if same and count >= period:
            found.append(((count + period) // period * period, -period, -begin))
        begin += count
    return found


def parts(items: Sequence[Item | Repeated], first: bool) -> list[Part]:
    """Items, and before each of them the elements that are moved; not before the `first` of all."""
    found: list[Part] = []
    for number, item in enumerate(items):
        if number or not first:
            found.append(entering(item))
        found.append(item)
    return found


def entering(item: Item | Repeated) -> int:
    """Elements of what goes into an item."""
    if isinstance(item, Repeated):
        return entering(item.items[0])
    return item.elements if isinstance(item, Residual) else item.input_elements
