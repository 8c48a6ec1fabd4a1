"""How DeepSpeed's `PipelineModule(partition_method="parameters")` cuts a model into stages (release 0.19)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def partition_balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Returns sizes of consecutive, non-empty parts with a close largest and smallest sum (as DeepSpeed's
    `partition_balanced`).

    weights   0 ....... cut ....... end ...
              <- part parts -><-part->             best partial partition up to each cut + the part after it

    For each end only one partial partition is kept, the one with the least difference so far, and of equals the one
    with the last cut. A worse one may end better, so this finds neither the least difference nor the least maximum in
    every case, exactly as DeepSpeed.
    """
    reach = np.concatenate(([0.0], np.cumsum(weights)))
    largest, smallest = np.full_like(reach, np.inf), np.full_like(reach, np.inf)
    largest[0] = 0.0  # no elements in no parts
    cuts = []
    for part in range(1, parts + 1):
        next_largest, next_smallest = np.full_like(reach, np.inf), np.full_like(reach, np.inf)
        cut = np.zeros(len(reach), dtype=np.int64)
        for end in range(part, len(reach)):
            part_sum = reach[end] - reach[:end]
            most, least = np.maximum(largest[:end], part_sum), np.minimum(smallest[:end], part_sum)
            best = end - 1 - int(np.argmin((most - least)[::-1]))
            cut[end], next_largest[end], next_smallest[end] = best, most[best], least[best]
        largest, smallest = next_largest, next_smallest
        cuts.append(cut)
    return _sizes(cuts, len(weights))


def _sizes(cuts: Sequence[np.ndarray], end: int) -> list[int]:
    """Follows the cuts from the last part to the first."""
    sizes = []
    for cut in reversed(cuts):
        sizes.append(end - int(cut[end]))
        end = int(cut[end])
    return sizes[::-1]
