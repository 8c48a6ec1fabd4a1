"""The cheapest strategies that fit, where what a device needs beside the products depends on them a little.

limit of what they hold     0 ---- small ======== low ........ high ----- there
                                   fits           fits   next  needs more than there is
"""

from __future__ import annotations

from collections.abc import Callable

from harness.sbp.limit import TooLarge
from harness.sbp.optimum import Route

TRIES, CLOSE = 8, 1e-3
"""Searches between what fits and what does not, and the share of the memory that is not worth one."""
Bytes = Callable[[Route], float]


def fitting(there: float, find: Callable[[float], Route], needed: Bytes, held: Bytes) -> Route:
    """A route that needs at most `there` bytes: the cheapest one, where needs beside what is held do not depend on it.

    `find` gives the cheapest route that holds at most so many bytes; it raises TooLarge where none holds so few, with
    the least. `needed` are all bytes of a device. Raises TooLarge with what the smallest route needs.
    """
    try:
        route = find(there)
    except TooLarge as error:
        raise TooLarge(needed(find(error.least))) from error
    if needed(route) <= there:
        return route
    best = _smallest(find)
    if needed(best) > there:
        raise TooLarge(needed(best))
    low, high = held(best), held(route)
    for _ in range(TRIES):
        if high - low <= CLOSE * there:
            break
        limit = there - needed(route) + held(route)
        if not low < limit < high:
            limit = (low + high) / 2
        route = find(limit)
        if needed(route) <= there:
            best, low = min(best, route, key=lambda one: one.seconds), limit
        else:
            high = held(route)
    return best


def _smallest(find: Callable[[float], Route]) -> Route:
    try:
        return find(0.0)
    except TooLarge as error:
        return find(error.least)
