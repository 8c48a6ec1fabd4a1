"""Partitions a sequence into consecutive, non-empty blocks. Every function returns the sizes of the blocks, in
order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

EQUAL = 1e-9
"""Costs that differ by less than this share of the largest are equal, because of rounding."""


def even(elements: int, blocks: int) -> list[int]:
    """Returns blocks of equal size; the first blocks get one more where the number does not divide."""
    _check(elements, blocks)
    size, rest = divmod(elements, blocks)
    return [size + (block < rest) for block in range(blocks)]


def exact(costs: Sequence[Matrix], sent: Matrix) -> list[int]:
    """Returns the blocks with the least maximum cost; of several the one that sends least, then the most even one.

    `costs[k][first, last]` is the cost of block k if it holds the elements `first`..`last`, and infinite where
    `first` > `last`; `sent[first, last]` is what is sent to such a block. Both are n x n, for n elements. "Most even"
    means the least sum of squared costs. Takes O(blocks n^2) time, most of it inside numpy.
    """
    _check(len(sent), len(costs))
    return _fewest_sent(costs, sent, _least_maximum(costs) * (1 + EQUAL))


def _least_maximum(costs: Sequence[Matrix]) -> float:
    """Returns the least possible cost of the largest block, by dynamic programming over the number of elements cut so
    far.

    elements   0 ......... first ........... last | last + 1 ...
               <- reached[first] -><- costs[k] -> |
               <-------- following[last + 1] ---->
    """
    reached = np.full(len(costs[0]) + 1, np.inf)
    reached[0] = 0.0
    for k, cost in enumerate(costs):
        own, after = _places(k, len(cost), len(costs))
        reached[after] = np.maximum(reached[own, None], cost[own, own]).min(axis=0)
    return float(reached[-1])


def _fewest_sent(costs: Sequence[Matrix], sent: Matrix, limit: float) -> list[int]:
    """Returns the blocks that cost at most `limit` each and send least in all; see the drawing of `_least_maximum`."""
    total = np.full(len(sent) + 1, np.inf)
    squares = total.copy()
    total[0] = squares[0] = 0.0
    starts = []
    possible = np.triu(np.ones_like(sent, dtype=bool))
    different = {id(cost): cost for cost in costs}  # few are
    allowed = {key: np.where(possible & (cost <= limit), sent, np.inf) for key, cost in different.items()}
    squared = {key: cost**2 for key, cost in different.items()}
    for k, cost in enumerate(costs):
        own, after = _places(k, len(sent), len(costs))
        new_total = total[own, None] + allowed[id(cost)][own, own]
        total[after] = least = new_total.min(axis=0)
        reached = new_total == np.where(np.isfinite(least), least, np.nan)
        new_squares = np.where(reached, squares[own, None] + squared[id(cost)][own, own], np.inf)
        starts.append(new_squares.argmin(axis=0))
        squares[after] = new_squares.min(axis=0)
    return _sizes_back(starts, len(sent))


def _places(k: int, elements: int, blocks: int) -> tuple[slice, slice]:
    """Returns the elements that block k can begin and end with, for each other block has one at least; and how many
    elements can be cut after it."""
    end = elements - blocks + k + 1
    return slice(k, end), slice(k + 1, end + 1)


def _sizes_back(starts: list[npt.NDArray[np.int64]], end: int) -> list[int]:
    """Follows the starts from the last block to the first; `starts[k]` are those of block k, counted from k, for each
    element that it can end with."""
    sizes = []
    for k, start in reversed([*enumerate(starts)]):
        first = k + int(start[end - 1 - k])
        sizes.append(end - first)
        end = first
    return sizes[::-1]


def barany_grinberg(weights: Sequence[float] | Vector, blocks: int) -> list[int]:
    """Runs the heuristic of torchgpipe (Barany and Grinberg, "Block partitions of sequences").

    Ends with largest block - smallest block <= largest element, for weights of at least 0. Weights are normalized by
    their maximum, so that the bound is 1. As long as it is missed, an element moves away from the longest block L
    towards the shortest S:

        | . . L . . . | . . . | . . S . |
                            <--           S takes the last element of its neighbour on the side of L

    S stays below L: it was shorter by more than 1, and one element is at most 1. Each move takes an element further
    from L, until the bound holds or L itself has lost one. So the longest blocks disappear one after the other.
    """
    elements = len(weights)
    _check(elements, blocks)
    reach = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64) / (max(weights) or 1.0))))
    ideal = np.linspace(0.0, reach[-1], blocks + 1)
    cuts = np.searchsorted(reach, ideal)
    cuts[0], cuts[-1] = 0, elements
    while True:
        sums = np.diff(reach[cuts])
        longest = int(sums.argmax())
        if sums[longest] - sums.min() <= 1 + EQUAL:
            return _without_empty(cuts)
        shortest = min(np.flatnonzero(sums == sums.min()), key=lambda block: abs(block - longest))
        if shortest > longest:
            cuts[shortest] -= 1
        else:
            cuts[shortest + 1] += 1


def _without_empty(cuts: npt.NDArray[np.int64]) -> list[int]:
    """Returns the sizes of the blocks; replaces an empty one (the paper allows it) by a further cut of another block.

    The bound holds: with an empty block no block is longer than the largest element, and cutting lengthens none.
    """
    chosen = set(cuts.tolist())
    free = (cut for cut in range(1, int(cuts[-1])) if cut not in chosen)
    chosen |= {next(free) for _ in range(len(cuts) - len(chosen))}
    return [int(size) for size in np.diff(sorted(chosen))]


def _check(elements: int, blocks: int) -> None:
    if not 1 <= blocks <= elements:
        raise ValueError(f"{elements} elements cannot be cut into {blocks} blocks: 1 to {elements} are possible")
