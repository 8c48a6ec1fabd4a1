"""Elements of a flat buffer in buckets, buckets in chunks.

bsize=4 k=2    elements  0123 4567 89ab c
               buckets   0    1    2    3
               chunks    0         1
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.schedule.myelin import chunks_of


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
    """Chunks of k buckets (0: all in one) of `bsize` elements, cut as the schedule's (`chunks_of`)."""
    found, start, number = [], 0, 0
    for place, sizes in enumerate(chunks_of(elements, 1, bsize, k, offload=True)):
        buckets = []
        for size in sizes.buckets:
            buckets.append(Bucket(f"chunk{place}/bucket{number}", start, start + size))
            start, number = start + size, number + 1
        found.append(Chunk(f"chunk{place}", tuple(buckets)))
    return found
