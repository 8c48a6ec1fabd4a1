"""Weights & Biases, offline by default: no account, no network; `wandb sync` uploads the run's folder later."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.problem import Problem, refuse
from harness.core.run_files import METRICS, RECORD
from harness.core.value_checks import above_0, one_of
from harness.trackers import Guarded, Tracker, none

MODES = ("offline", "online", "disabled")
FILES = (RECORD, METRICS)
"""Files of the run that are copied to W&B, so that the record can be restored from there."""
_LONGEST_TAG = 64


@dataclass
class Config:
    name: str = "wandb"
    """Mirrors the record to Weights & Biases."""
    mode: str = "offline"
    """offline: write files in the run's folder only. online: send to the server (needs `wandb login`). disabled:
    nothing."""
    project: str = "regatta"
    """The W&B project."""
    entity: str | None = None
    """The W&B user or team; null: the account's default."""
    timeout_s: float = 30.0
    """With mode=online, seconds to wait for the server at the start of a run and at its end."""


class WandbTracker:
    """One W&B run. Its id is the record's id.

    A run that resumes is mirrored from its first step again: offline its newest folder has all of it, online the server
    leaves out steps that it has.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._run: Any = None
        self._folder = Path()
        self._step = 0

    def start(
        self,
        record_id: str,
        group: str,
        job_type: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
        folder: Path,
    ) -> None:
        self._folder = Path(folder).resolve()
        (self._folder / "wandb").mkdir(parents=True, exist_ok=True)  # W&B itself would go to /tmp where it cannot
        with _environment(self._folder):
            import wandb

            try:
                self._log_in(wandb)
                self._run = wandb.init(
                    id=record_id,
                    resume="allow",
                    name=record_id,
                    project=self._config.project,
                    entity=self._config.entity,
                    group=group,
                    job_type=job_type,
                    tags=[tag[:_LONGEST_TAG] for tag in tags if tag],
                    config=dict(config),
                    mode=self._config.mode,  # type: ignore[arg-type]
                    dir=str(self._folder),
                    settings=wandb.Settings(**self._settings()),
                )
            except BaseException:
                wandb.teardown(exit_code=1)
                raise

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._step = step
        self._run.log(flat(metrics), step=step, commit=True)

    def finish(self, summary: Mapping[str, Any], images: Mapping[str, Path], status: str) -> None:
        if self._run is None:
            return
        with _environment(self._folder):
            import wandb

            pictures = {name: wandb.Image(str(path)) for name, path in images.items() if Path(path).is_file()}
            if pictures:
                self._run.log(pictures, step=self._step + 1, commit=True)
            self._run.summary.update({**flat(summary), "status": status})
            for name in FILES:
                if (self._folder / name).is_file():
                    self._run.save(self._folder / name, base_path=self._folder, policy="now", glob=False)
            self._run.finish(exit_code=0 if status == "ok" else 1)
            wandb.teardown()  # ends the service process too; a later run in this process starts its own

    def _log_in(self, wandb: Any) -> None:
        online = self._config.mode == "online"
        if online and not wandb.login(verify=False, prompt=False, timeout=int(self._config.timeout_s)):
            raise RuntimeError("tracker.mode online needs an API key: run `wandb login`, or use tracker.mode=offline")

    def _settings(self) -> dict[str, Any]:
        """Return settings that turn off W&B's own capture of console, code, git, machine and packages."""
        return {
            "silent": True,
            "symlink": False,  # what is saved stays with W&B's files, wherever they go
            "console": "off",
            "save_code": False,
            "disable_git": True,
            "disable_code": True,
            "disable_job_creation": True,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "x_disable_stats": True,  # its sampling thread would take time from the devices
            "x_save_requirements": False,
            "x_transaction_log_flush_interval": 1,  # a hard kill loses one second, not fifteen
            "init_timeout": self._config.timeout_s,
            "finish_timeout": self._config.timeout_s,
            "reinit": "finish_previous",
        }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested metrics as single plots: {"peak": [1, 2]} is {"peak/0": 1, "peak/1": 2}; null values are left out."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, (list, tuple)):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}/")
        elif value is not None:
            found[name] = value
    return found


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Within it W&B is silent, keeps every file below `folder` (not in the home directory), reports no errors home."""
    places = {
        name: str(folder / "wandb" / place)
        for name, place in (("WANDB_DATA_DIR", "data"), ("WANDB_CACHE_DIR", "cache"), ("WANDB_CONFIG_DIR", "config"))
    }
    changes = {"WANDB_DIR": str(folder), "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", **places}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def build(config: Config) -> Tracker:
    """Raises `CannotRun` for a mode or a time limit that is none."""
    refuse(check(config), "tracker=wandb")
    if config.mode == "disabled":
        return none.build(none.Config())
    return Guarded(f"wandb (tracker.mode={config.mode})", WandbTracker(config))


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    mode = one_of("tracker.mode", config.mode, MODES, "offline")
    return [*mode, *above_0("tracker.timeout_s", config.timeout_s, 30)]
