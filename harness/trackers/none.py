"""No tracker: the record in the run's folder is all there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.trackers import Tracker


@dataclass
class Config:
    name: str = "none"
    """Keeps the local record only."""


class NoTracker:
    """Does nothing."""

    def start(
        self,
        record_id: str,
        group: str,
        job_type: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
        folder: Path,
    ) -> None: ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any], images: Mapping[str, Path], status: str) -> None: ...


def build(config: Config) -> Tracker:
    return NoTracker()
