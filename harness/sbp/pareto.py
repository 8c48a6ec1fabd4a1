"""Pareto-optimal paths in seconds and bytes.

A key is the number of a group and, in its last bits, the bytes: (group << bits) + bytes. Bytes and seconds are integers
below 2**bits, so that the seconds of a later group can be put below those of all earlier ones.
"""

from __future__ import annotations

import numpy as np

SLOTS = 15
"""Bits of the number of a slot."""
SCATTER = np.uint64(0x9E3779B97F4A7C15)
"""2**64 times the golden section: the upper bits of its products are spread evenly."""


def pareto_optimal(key: np.ndarray, seconds: np.ndarray, bits: int) -> np.ndarray:
    """Returns the indices of entries that no other one of their group equals or beats in both; of equal ones one.

    They are sorted by group, and in each by increasing bytes, which is decreasing seconds.

        seconds |x
                |   o       o: x below it on the left
                |  x
                |     x   o
                +------------ bytes
    """
    candidates = _thinned(key, seconds) if len(key) >> SLOTS else np.arange(len(key))
    order = candidates[np.argsort(key[candidates])]
    key = key[order]
    kept = np.ones(len(order), dtype=bool)
    level = seconds[order] - (key >> bits << bits)
    kept[1:] = level[1:] < np.minimum.accumulate(level)[:-1]
    order, key = order[kept], key[kept]
    last = np.ones(len(order), dtype=bool)
    last[:-1] = key[1:] != key[:-1]  # with equal bytes each has less seconds than the one before
    result: np.ndarray = order[last]
    return result


def _thinned(key: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns the indices of all entries except most of those that another one with their key beats in seconds.

    It does not sort: an entry is compared only with the one of least seconds in its slot of a hash table.
    """
    slot = (key.view(np.uint64) * SCATTER >> np.uint64(64 - SLOTS)).view(np.int64)
    least = np.full(1 << SLOTS, np.iinfo(np.int64).max)
    np.minimum.at(least, slot, seconds)
    first = seconds == least[slot]
    owner = np.full(1 << SLOTS, -1)
    owner[slot[first]] = key[first]
    return np.flatnonzero(first | (owner[slot] != key))


def ranks(values: np.ndarray) -> np.ndarray:
    """Returns integers in the order of the values, equal for equal ones."""
    result: np.ndarray = np.unique(values, return_inverse=True)[1]
    return result


def matches(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of all pairs of equal keys, in the order of the left ones and then of the right ones."""
    order = np.argsort(right, kind="stable")
    begin, end = (np.searchsorted(right[order], left, side) for side in ("left", "right"))
    count = end - begin
    ones = np.repeat(np.arange(len(left)), count)
    others = np.arange(len(ones)) - np.repeat(np.cumsum(count) - count - begin, count)
    return ones, order[others]
