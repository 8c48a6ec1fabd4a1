"""The fullest moment of a device, from what is held on it."""

from __future__ import annotations

from numba import njit


@njit(cache=True)
def fullest(start_s, begun, end_s, freed):  # type: ignore[no-untyped-def]
    """Returns the most bytes that are held at a moment, and the first moment at which they are.

    `begun` are the bytes that are held from `start_s` on, `freed` those until `end_s`; both times ascend. Of changes at
    one moment the free comes first.
    """
    held, most, at_s, ended = 0, -1, 0.0, 0
    for place in range(len(start_s)):
        while ended < len(end_s) and end_s[ended] <= start_s[place]:
            held -= freed[ended]
            ended += 1
        held += begun[place]
        if held > most:
            most, at_s = held, start_s[place]
    return most, at_s
