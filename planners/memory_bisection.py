"""The cheapest strategies that fit, where the other memory of a device depends slightly on them: bisects the limit.

limit of what they hold     0 ---- small ======== low ........ high ----- available
                                   fits           fits   next  does not fit
"""

from __future__ import annotations

from collections.abc import Callable

from harness.sbp.memory_limit import TooLarge
from harness.sbp.shortest_path import Route

TRIES, CLOSE = 8, 1e-3
"""The number of bisection steps, and the share of the memory at which they end."""
Bytes = Callable[[Route], float]


def cheapest_that_fits(available: float, find: Callable[[float], Route], needed: Bytes, held: Bytes) -> Route:
    """Returns a route that needs at most `available` bytes; the cheapest one, if the other bytes do not depend on it.

    `find` returns the cheapest route that holds at most a limit of bytes; it raises TooLarge with the least bytes if
    none does. `needed` are all bytes of a device. Raises TooLarge with what the smallest route needs.
    """
    try:
        route = find(available)
    except TooLarge as error:
        raise TooLarge(needed(find(error.least))) from error
    if needed(route) <= available:
        return route
    best = _smallest(find)
    if needed(best) > available:
        raise TooLarge(needed(best))
    low, high = held(best), held(route)
    for _ in range(TRIES):
        if high - low <= CLOSE * available:
            break
        limit = available - needed(route) + held(route)
        if not low < limit < high:
            limit = (low + high) / 2
        route = find(limit)
        if needed(route) <= available:
            best, low = min(best, route, key=lambda candidate: candidate.seconds), limit
        else:
            high = held(route)
    return best


def _smallest(find: Callable[[float], Route]) -> Route:
    try:
        return find(0.0)
    except TooLarge as error:
        return find(error.least)
