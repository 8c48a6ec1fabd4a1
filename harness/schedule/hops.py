"""Which tensors travel between stages: the boundaries, and the skips with or without portals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.plan import Plan
from harness.profile import ModelProfile


@dataclass(frozen=True)
class Hop:
    """A value that stage `target` gets from stage `source` (an earlier one). `part` is "" for the layer output."""

    source: int
    target: int
    part: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class StageSkip:
    """A skip between stages: stashed in stage `source`, popped in stage `target`."""

    source: int
    target: int
    name: str
    bytes: int = 0


def hops(boundaries: Iterable[int], skips: Iterable[StageSkip], portals: bool) -> list[Hop]:
    """All hops of one micro-batch, by target; `boundaries[j]` are the bytes that enter stage j + 1.

    Skips come before the boundary: they are there earlier, and copies to a device are made one after the other.

    stage     0       1       2       3
    portals   s ----------------------> t        one copy
    without   s ----> . ----> . ------> t        a copy to every stage in between
    """
    found = [Hop(j, j + 1, "", size) for j, size in enumerate(boundaries)]
    for skip in skips:
        if portals:
            found.append(Hop(skip.source, skip.target, skip.name, skip.bytes))
        else:
            found += [Hop(j, j + 1, skip.name, skip.bytes) for j in range(skip.source, skip.target)]
    return sorted(found, key=lambda hop: (hop.target, hop.part == "", hop.source, hop.part))


def plan_hops(plan: Plan, profile: ModelProfile, portals: bool) -> list[Hop]:
    """The hops of a planned model; values that stay inside a stage do not travel."""
    skips = []
    for skip in profile.skips:
        source, target = plan.stage_of(skip.source), plan.stage_of(skip.target)
        if source != target:
            skips.append(StageSkip(source, target, skip.name, skip.bytes))
    return hops([profile.boundary_bytes(stage.first) for stage in plan.stages[1:]], skips, portals)
