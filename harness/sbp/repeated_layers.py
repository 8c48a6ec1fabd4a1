"""Repeated blocks of a chain that get the same split ("identical split for repeated layers", AutoDDL).

    items      first  [a b] [a b] [a b]  last
    fold_repeats     first  Repeated((a, b), 3)  last

The blocks have the same strategies and layouts: the stream enters each in one place E and leaves it in one place F.

    ... --> E a b F --> E a b F --> E a b F --> ...          n x block[E, F] + (n - 1) x move[F, E]

Where nothing moves between the blocks, E is F. A free input of the first matmul is free in the first block only; then
the first matmul of each block is placed where its block is entered, as in the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from harness.sbp.matmul_chain import Item, Residual, is_cut, one_way
from harness.sbp.route import Step, Steps


@dataclass(frozen=True)
class Repeated:
    """A block of items, repeated `times`."""

    items: tuple[Item, ...]
    times: int

    def steps(self, block: Steps, between: Steps) -> Steps:
        """Returns all steps, from those in a block and between two; only the first block may have a free input."""
        later_block = [step._replace(free=False) if isinstance(step, Step) else step for step in block]
        return block + (between + later_block) * (self.times - 1)


Part = Item | Repeated | float
"""A part of a chain to search: an item, or the elements of a tensor that is moved."""


def fold_repeats(items: Sequence[Item], key: Callable[[Item], object]) -> tuple[Item | Repeated, ...]:
    """Replaces the longest run of equal blocks by one `Repeated`.

    A run consists of at least two equal periods of items, one after the other; `key` is equal for equal items. Of runs
    with the same number of items it takes the one with the shortest period, of those the first.
    """
    numbers: dict[object, int] = {}
    keys = [numbers.setdefault(key(item), len(numbers)) for item in items]
    best = max((run for period in range(1, len(keys) // 2 + 1) for run in _runs(keys, period)), default=None)
    if best is None:
        return tuple(items)
    length, period, begin = best[0], -best[1], -best[2]
    run = Repeated(tuple(items[begin : begin + period]), length // period)
    return (*items[:begin], run, *items[begin + length :])


def _runs(keys: Sequence[int], period: int) -> list[tuple[int, int, int]]:
    """Returns (items, - period, - begin) of every run with this period."""
    runs, begin = [], 0
    for same, group in groupby(earlier == later for earlier, later in zip(keys, keys[period:], strict=False)):
        count = len(list(group))
        if same and count >= period:
            runs.append(((count + period) // period * period, -period, -begin))
        begin += count
    return runs


def parts(items: Sequence[Item | Repeated], first: bool) -> list[Part]:
    """Returns the items, and before each of them the elements that are moved; none before the first item if `first`."""
    parts_and_moves: list[Part] = []
    for number, item in enumerate(items):
        if number or not first:
            parts_and_moves.append(entering(item))
        parts_and_moves.append(item)
    return parts_and_moves


def entering(item: Item | Repeated) -> int:
    """Returns the elements of an item's input, which say whether it gets a gradient."""
    if isinstance(item, Repeated):
        return entering(item.items[0])
    return one_way(item.elements if isinstance(item, Residual) else item.input_elements, is_cut(item))
