"""Whether a run goes on where an earlier start in its folder was ended: what that one has left, and how to take it up.

It does with a checkpoint of the same configuration; but for `FREE` keys, and more steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness import checkpoint_files, files
from harness.cluster import Cluster
from harness.interfaces import Planner, PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.record import RunRecord
from harness.serial import SchemaError

FREE = ("launch", "tracker", "out")
"""Keys that are free to differ: the losses do not depend on them."""


@dataclass(frozen=True)
class Resumed:
    """Steps that are done, the record of the start that did them, its plan."""

    step: int
    record: RunRecord
    plan: Plan | None

    @property
    def steps(self) -> list[int]:
        """For the manifest: after how many steps each start since the first has gone on."""
        return [*self.record.manifest.get("resumed", []), self.step]


@dataclass(frozen=True)
class Unfinished:
    """The files of an earlier start, by name."""

    folder: Path
    config: str
    plan: str
    record: str
    metrics: str

    def resumed(self, config: DictConfig, say: Callable[[str], None]) -> Resumed | None:
        """What to go on from, its lines cut to its steps; None where there is nothing. `say`s why it is not used."""
        checkpoint_files.tidy(self.folder)
        found = checkpoint_files.steps(self.folder) if config.mode == "run" else []
        record = self._record() if found else None
        if record is None or record.status == "ok":
            return None
        if differs := [*self._differences(config), *_too_few(config, found[0])]:
            say(f"the unfinished run in this folder has {', '.join(differs)}: this one begins anew")
            return None
        for step in found:
            if checkpoint_files.whole(self.folder, step) and self._cut_lines(step):
                return Resumed(step, record, self._plan())
            checkpoint_files.pass_over(self.folder, step)
            say(f"the checkpoint {checkpoint_files.after(step)} is damaged, or its lines are lost: it is passed over")
        return None

    def _record(self) -> RunRecord | None:
        try:
            return RunRecord.load(self.folder / self.record)
        except (OSError, SchemaError, UnicodeDecodeError):
            return None

    def _plan(self) -> Plan | None:
        try:
            return Plan.load(self.folder / self.plan)
        except (OSError, SchemaError, UnicodeDecodeError):
            return None

    def _differences(self, config: DictConfig) -> Iterator[str]:
        try:
            before = _flat(OmegaConf.to_container(OmegaConf.load(self.folder / self.config)))
        except Exception:  # a YAML that is cut off, or none
            yield "no configuration"
            return
        now = _flat(OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(config, resolve=True))))
        for key in sorted(before.keys() | now.keys()):
            if key.partition(".")[0] not in FREE and key != "steps" and before.get(key) != now.get(key):
                yield f"{key} {before.get(key)}, here it is {now.get(key)}"

    def _cut_lines(self, count: int) -> bool:
        """Leave the lines of so many steps; false where they are not all there."""
        try:
            lines = (self.folder / self.metrics).read_bytes().splitlines(keepends=True)[:count]
            if [json.loads(line)["step"] for line in lines] != list(range(count)):
                return False
        except (OSError, ValueError, KeyError, TypeError):
            return False
        files.write_bytes(self.folder / self.metrics, b"".join(lines))
        return True


def _too_few(config: DictConfig, step: int) -> list[str]:
    total = config.warmup + config.steps
    return [] if step < total else [f"a checkpoint {checkpoint_files.after(step)}, here there are {total}"]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"model.depth": 3}: a list is a value."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return found


@dataclass(frozen=True)
class SamePlan:
    """A planner that plans as before. Another profile may lead to other stages, whose sums round otherwise."""

    before: Plan
    planner: Planner

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """The plan before, unless it is now for another mesh: then the losses agree but for rounding."""
        mesh = self.before.mesh
        if (request.pipeline, request.data, request.tensor) == (mesh.pipeline, mesh.data, mesh.tensor):
            return self.before
        return self.planner.plan(profile, cluster, memory, request)
