"""Micro-batches of one size in a sweep over engines, as in a race, unless a key says otherwise.

    engine=gpipe   batch.size=16, 8 micro-batches        |2|2|2|2|2|2|2|2|
    engine=ddp     2 replicas, as it is by default       |1|1|1|1|1|1|1|1|   in each
                   batch.micro_batch_size=2              |2|2|2|2|           in each

So batch norm and dropout see the same batches, losses agree, and no kernel is smaller than another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig

from harness.checks import micro_batches
from harness.core.problem import bare_key
from harness.core.record import RunRecord
from harness.sweep import run_point
from harness.sweep.points import Point

Composed = Callable[[Point], DictConfig | RunRecord]
GIVEN = (micro_batches.COUNT, micro_batches.SIZE)
OF_ENGINES = ("engine", "planner", "mesh")
"""Groups of keys in which the points that are compared differ."""
WITHOUT_EFFECT = ("seed", "optimizer", "data", "steps", "warmup", "tracker", "launch")
"""Groups of keys that do not change the size of a micro-batch."""
MODES = ("run", "plan", "simulate")


def equalized(
    points: Sequence[Point], overrides: Sequence[str], composed: Composed = run_point.composed
) -> list[Point]:
    """The points of a sweep over engines with micro-batches of one size: that of the first of those that differ only in
    engine, planner and mesh. A point whose batch does not allow it, or that cannot run, stays as it is.

    So does each where the command line gives the number or the size of micro-batches, has one engine, or names a file.
    """
    keys = {bare_key(text) for text in overrides}
    if keys & {*GIVEN, "sweeps"} or len({point.values().get("engine") for point in points}) < 2:
        return list(points)
    first: dict[Any, int] = {}
    given: dict[Any, int] = {}
    found = []
    for point in points:
        same = _key(point, WITHOUT_EFFECT)
        if same not in given:
            config = composed(point)
            own = samples(config) if able(config) else 0
            wanted = first.setdefault(_key(point, (*OF_ENGINES, *WITHOUT_EFFECT)), own) if own else 0
            given[same] = wanted if own != wanted and able(composed(of_size(point, wanted))) else 0
        found.append(of_size(point, given[same]) if given[same] else point)
    return found


def able(config: DictConfig | RunRecord) -> bool:
    """Whether it is the configuration of a point that can run, in a mode whose micro-batches are given."""
    return not isinstance(config, RunRecord) and config.mode in MODES


def samples(config: Any) -> int:
    """The samples of a micro-batch."""
    return max(1, config.batch.size // (micro_batches.replicas(config) * config.batch.micro_batches))


def of_size(point: Point, size: int) -> Point:
    """A point with micro-batches of so many samples."""
    return Point.of([*point.overrides, f"{micro_batches.SIZE}={size}"])


def _key(point: Point, without: Sequence[str]) -> frozenset[tuple[str, str]]:
    return frozenset((key, value) for key, value in point.values().items() if key.partition(".")[0] not in without)
