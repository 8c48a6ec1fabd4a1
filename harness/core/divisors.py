"""Divisors of a batch: the numbers of micro-batches that share it equally."""

from __future__ import annotations

import math

MOST = 10**6
"""Divisors that are tried: what a user may type is not limited before its divisors are asked for."""


def list_divisors(number: int) -> list[int]:
    """Returns all divisors of a number of at least 1, the smallest first.

    Of one above the square of `MOST`, those up to `MOST` and their counterparts: no run has so many samples or devices.
    """
    small = [divisor for divisor in range(1, min(math.isqrt(number), MOST) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest_divisors(number: int, count: int) -> list[int]:
    """Returns the divisors of `number` just below and above `count`, which is no divisor; the nearer one first."""
    below = [divisor for divisor in list_divisors(number) if divisor < count][-1:]
    above = [divisor for divisor in list_divisors(number) if divisor > count][:1]
    return sorted(above + below, key=lambda divisor: abs(divisor - count))
