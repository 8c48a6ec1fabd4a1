"""Elements of a flat buffer in buckets, buckets in chunks. A bucket visits the device in two halves.

bsize=4 k=2    elements  01 23 45 67 89 ab c
               halves    0a 0b 1a 1b 2a 2b 3a
               chunks    0           1
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.schedule.builders.myelin import split_into_chunks
from harness.schedule.optimizer_chunks import HALVES


@dataclass(frozen=True)
class Half:
    """Half a bucket: the elements `start` .. `stop` - 1, which visit the `place` 0 (first halves) or 1.

    `part` is its name in a trace; buckets are numbered through all chunks.
    """

    part: str
    place: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """Neighbouring buckets, whose gradients are summed together."""

    part: str
    halves: tuple[Half, ...]

    @property
    def start(self) -> int:
        return self.halves[0].start

    @property
    def stop(self) -> int:
        return self.halves[-1].stop


def chunks(elements: int, bsize: int, k: int) -> list[Chunk]:
    """Chunks of k buckets (0: all in one) of `bsize` elements, cut as the schedule's (`split_into_chunks`)."""
    found, start, number = [], 0, 0
    for c, chunk in enumerate(split_into_chunks(elements, 1, bsize, k, offload=True)):
        halves = []
        for bucket in chunk.buckets:
            for place, size in enumerate(bucket):
                halves.append(Half(f"chunk{c}/bucket{number}{HALVES[place]}", place, start, start + size))
                start += size
            number += 1
        found.append(Chunk(f"chunk{c}", tuple(halves)))
    return found
