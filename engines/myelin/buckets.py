"""Elements of a flat buffer in buckets, buckets in chunks.

bsize=4 k=2    elements  0123 4567 89ab c
               buckets   0    1    2    3
               chunks    0         1
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """The elements `start` .. `stop` - 1. `part` is its name in a trace; buckets are numbered through all chunks."""

    part: str
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """Neighbouring buckets, whose gradients are summed together."""

    part: str
    buckets: tuple[Bucket, ...]

    @property
    def start(self) -> int:
        return self.buckets[0].start

    @property
    def stop(self) -> int:
        return self.buckets[-1].stop


def chunks(elements: int, bsize: int, k: int) -> list[Chunk]:
    """Chunks of k buckets (0: all in one) of `bsize` elements; the last ones are shorter, without elements none."""
    starts = range(0, elements, bsize)
    width = k or max(1, len(starts))
    found = []
    for number, first in enumerate(range(0, len(starts), width)):
        buckets = tuple(
            Bucket(f"chunk{number}/bucket{first + place}", start, min(start + bsize, elements))
            for place, start in enumerate(starts[first : first + width])
        )
        found.append(Chunk(f"chunk{number}", buckets))
    return found
