"""Cache of what engines take on this machine (`harness.core.cluster.EngineCosts`), in the folder of the machine's own
measurement: a file for each engine and optimizer."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import warnings
from pathlib import Path

from harness.core.cluster import EngineCosts
from harness.host import profile_cache

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


def path(engine: str, source: Path, optimizer: str, machine: str) -> Path:
    """Returns the path of the costs of an engine, whose module or package is `source`, with an optimizer, relative to a
    measurement of this machine."""
    harness = Path(__file__).parents[1]
    files = [file for place in (source, *(harness / name for name in MEASURING)) for file in _files(place)]
    key = {
        "machine": machine,
        "engine": engine,
        "optimizer": optimizer,
        "python": platform.python_version(),
        "sources": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{engine} {optimizer}")
    return profile_cache.folder().parent / "machines" / f"{name}-{digest}.json"


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def load(place: Path) -> EngineCosts | None:
    """Returns what is at `place`; None if there is none that can be read."""
    return profile_cache.read(EngineCosts, place)


def store(place: Path, costs: EngineCosts) -> None:
    """Caches costs. A folder that cannot be written is a warning: the next run measures again."""
    try:
        costs.save(place)
    except OSError as error:
        warnings.warn(
            f"what engine={costs.engine} takes is not kept, the next run measures again: {place}: "
            f"{error.strerror or error} -> set REGATTA_CACHE to a folder that can be written",
            stacklevel=2,
        )
