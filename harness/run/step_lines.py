"""The steps of a run as its ranks report them, passed on to the terminal and the tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from harness.core import units
from harness.core.files import LineFollower
from harness.core.run_files import METRICS
from harness.report.progress import Progress
from harness.run import checkpoint_files
from harness.run.checkpoint_files import after_steps
from harness.trackers import Tracker


class StepLines:
    """The lines of metrics.jsonl, passed on to progress and tracker as they come; `done` steps have ended, the first
    `start` of them before; `seconds` are those of the others, with the wait for the batch."""

    def __init__(self, config: DictConfig, path: Path, progress: Progress, tracker: Tracker, start: int) -> None:
        self.config, self.path, self.progress, self.tracker, self.start = config, path, progress, tracker, start
        self.tail, self.done = LineFollower(self.path / METRICS), 0
        self.failed: tuple[int, dict[str, Any]] | None = None
        self.said = ""
        self.seconds: list[float] = []

    def forward(self) -> None:
        for line in self.tail.new():
            if line["step"] == 0:
                self.progress.steps(self.config.warmup + self.config.steps)
            self.done = line["step"] + 1
            error = line.pop("checkpoint_error", None)
            speed = self.config.batch.size / line["step_time_s"]
            if line["step"] >= self.start:
                self.seconds.append(line["step_time_s"] + line["data_wait_s"])
                self.progress.step(self.done, line["loss"], speed)
            self.tracker.log(line["step"], {**line, "throughput": speed})
            if error and self.done > self.start:
                self._note_once(error)

    def _note_once(self, error: dict[str, Any]) -> None:
        """Say at once that a checkpoint could not be written, and of those after it only where that is news."""
        self.failed = self.done, error
        where = self._resumable()
        if where != self.said:
            self.progress.note(f"note: {self.unsaved()}")
        self.said = where

    def unsaved(self) -> str:
        """Why there is no checkpoint after the last step that should have one; nothing if there is."""
        if self.failed is None or any(step > self.failed[0] for step in checkpoint_files.steps(self.path)):
            return ""
        step, error = self.failed
        sizes = f"{units.size(error['needed_bytes'])} are needed, {units.size(error['free_bytes'])} are free"
        return f"no checkpoint {after_steps(step)}: {error['message']}; {sizes}; {self._resumable()}"

    def _resumable(self) -> str:
        steps = checkpoint_files.steps(self.path)
        return f"the run could resume {after_steps(steps[0])}" if steps else "there is none to resume from"
