"""Trackers mirror a run somewhere else; the local record is the truth, so a tracker that fails never ends a run.

The parent process of a run owns its tracker and calls it in this order: `start`, `log` once a step, `finish`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A service that a run is mirrored to."""

    def start(
        self,
        record_id: str,
        group: str,
        job_type: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
        folder: Path,
    ) -> None:
        """Open the run `record_id`. `group` is its sweep, `job_type` its engine; all files go below `folder`."""
        ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics of one step; steps rise, from 0 also in a run that resumes."""
        ...

    def finish(self, summary: Mapping[str, Any], images: Mapping[str, Path], status: str) -> None:
        """Close the run with its final metrics, its pictures (name to PNG file) and the record's status."""
        ...


class Guarded:
    """A tracker whose first failure is a warning; after it the tracker is left alone and the run continues."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker

    def start(
        self,
        record_id: str,
        group: str,
        job_type: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
        folder: Path,
    ) -> None:
        """Start the run; `group`, `job_type` and `tags` say where the service files it, `folder` holds its files."""
        self._try(lambda tracker: tracker.start(record_id, group, job_type, tags, config, folder))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of a step."""
        self._try(lambda tracker: tracker.log(step, metrics))

    def finish(self, summary: Mapping[str, Any], images: Mapping[str, Path], status: str) -> None:
        """End the run with its summary, its pictures by name and its status."""
        self._try(lambda tracker: tracker.finish(summary, images, status))

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:
            self._tracker = None
            said = str(error).strip().splitlines()
            reason = said[0] if said else type(error).__name__
            _log.warning("tracker %s failed and is left out of this run: %s -> tracker=none", self._name, reason)
