"""The fullest moment of a device, from what is held on it."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def fullest(start_s, begun, begun_in, end_s, freed, freed_in, pools):  # type: ignore[no-untyped-def]
    """Returns the most bytes that are held at a moment, the first moment at which they are, and the sum of the most
    bytes of each of `pools` pools.

    `begun` are the bytes that are held from `start_s` on, in the pools `begun_in`, the others those until `end_s`; both
    times ascend. Of changes at one moment the free comes first.
    """
    held, most, at_s, ended = 0, -1, 0.0, 0
    held_in, most_in = np.zeros(pools, dtype=np.int64), np.zeros(pools, dtype=np.int64)
    for place in range(len(start_s)):
        while ended < len(end_s) and end_s[ended] <= start_s[place]:
            held -= freed[ended]
            held_in[freed_in[ended]] -= freed[ended]
            ended += 1
        held += begun[place]
        if held > most:
            most, at_s = held, start_s[place]
        pool = begun_in[place]
        held_in[pool] += begun[place]
        most_in[pool] = max(most_in[pool], held_in[pool])
    return most, at_s, most_in.sum()
