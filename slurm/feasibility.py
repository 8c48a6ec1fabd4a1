"""Find the resources that each point needs, and whether it can run, before anything is submitted."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from omegaconf import DictConfig

from harness.core.record import RunRecord
from harness.host import devices
from harness.sweep import run_point
from harness.sweep.points import Point
from slurm.resources import Need, expected, need
from slurm.settings import Settings

CHUNK = 32
"""Points that one process takes at a time; fewer than two of these are not worth a second process."""


@dataclass(frozen=True)
class Examined:
    """`refused` is the record of a point that cannot run, which needs nothing; any other may take `grace_s` to stop."""

    need: Need
    grace_s: float = 0.0
    refused: RunRecord | None = None


def examine(points: Sequence[Point], settings: Settings) -> list[Examined]:
    """Look at each point, as it will be in the job that it is to have. Uses all cores."""
    look = partial(_look, settings=settings)
    if len(points) < 2 * CHUNK:
        return list(map(look, points))
    with ProcessPoolExecutor(devices.cores(), multiprocessing.get_context("fork")) as pool:
        return list(pool.map(look, points, chunksize=CHUNK))


def composed(point: Point, settings: Settings) -> DictConfig | RunRecord:
    """The configuration of a point as it will be in its job, or the record of one that cannot run."""
    return run_point.composed(point, lambda config: expected(need(config, settings), config, settings))


def _look(point: Point, settings: Settings) -> Examined:
    made = composed(point, settings)
    if isinstance(made, RunRecord):
        return Examined(Need(1), refused=made)
    return Examined(need(made, settings), made.launch.grace_s)
