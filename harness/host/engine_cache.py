"""Where the cache has what engines take on this machine (`harness.core.cluster.EngineCosts`): in the folder of the
machine's own measurement, a file for each engine and optimizer."""

from __future__ import annotations

import platform
from pathlib import Path

from harness.host import machine, profile_cache

MEASURING = (
    "worker/measure_engine.py",
    "planning/draft.py",
    "simulator",
    "schedule",
    "launch/forked_ranks.py",
    "launch/process_group.py",
    "nn",
    "runtime",
    *profile_cache.MEASURING,
)
"""Modules and packages of harness/ whose edits make a measurement out of date, next to the engine's own."""


def path(engine: str, source: Path, optimizer: str, measurement: str) -> Path:
    """Returns the path of the costs of an engine, whose module or package is `source`, with an optimizer, relative to a
    `measurement` of this machine, by its name."""
    harness = Path(__file__).parents[1]
    files = [file for place in (source, *(harness / name for name in MEASURING)) for file in _files(place)]
    key = {
        "machine": measurement,
        "engine": engine,
        "optimizer": optimizer,
        "python": platform.python_version(),
        "sources": profile_cache.digest(files),
    }
    return profile_cache.keyed(machine.folder(), f"{engine} {optimizer}", key)


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]
