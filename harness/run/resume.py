"""Whether a run resumes where an earlier start in its folder ended: from which checkpoint, with which plan.

It resumes from a checkpoint of the same configuration; `FREE` keys may differ, and there may be more steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness.core import files
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.record import RunRecord
from harness.core.run_files import CONFIG, METRICS, PLAN, RECORD
from harness.core.serialization import SchemaError
from harness.interfaces import Planner, PlanRequest
from harness.run import checkpoint_files
from harness.run.checkpoint_files import after_steps

FREE = ("launch", "tracker", "out")
"""Keys that may differ: the losses do not depend on them."""


@dataclass(frozen=True)
class Resumed:
    """The steps that are done, the record of the start that did them, its plan."""

    step: int
    record: RunRecord
    plan: Plan | None

    @property
    def steps(self) -> list[int]:
        """Return the steps at which each start after the first one resumed, for the manifest."""
        return [*self.record.manifest.get("resumed", []), self.step]


def find_resumable(folder: Path, config: DictConfig, say: Callable[[str], None]) -> Resumed | None:
    """Find the checkpoint to resume from and cut metrics.jsonl to its steps; None if there is none. `say` gets the
    reason."""
    checkpoint_files.remove_partial(folder)
    steps = checkpoint_files.steps(folder) if config.mode == "run" else []
    record = _load_or_none(RunRecord, folder / RECORD) if steps else None
    if record is None or record.status == "ok":
        return None
    if differs := [*_differences(folder, config), *_too_few_steps(config, steps[0])]:
        say(f"the unfinished run in this folder has {', '.join(differs)}: this one starts again from step 0")
        return None
    for step in steps:
        if checkpoint_files.is_whole(folder, step) and _cut_lines(folder, step):
            return Resumed(step, record, _load_or_none(Plan, folder / PLAN))
        checkpoint_files.set_aside(folder, step)
        say(f"the checkpoint {after_steps(step)} is damaged, or its lines are lost: it is not used")
    return None


def _load_or_none(kind: Any, path: Path) -> Any:
    try:
        return kind.load(path)
    except (OSError, SchemaError):
        return None


def _differences(folder: Path, config: DictConfig) -> Iterator[str]:
    """The keys whose values are others than in the folder's configuration."""
    try:
        before = _flat(OmegaConf.to_container(OmegaConf.load(folder / CONFIG)))
    except Exception:  # a YAML that is cut off, or none
        yield "no configuration"
        return
    now = _flat(OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(config, resolve=True))))
    for key in sorted(before.keys() | now.keys()):
        if key.partition(".")[0] not in FREE and key != "steps" and before.get(key) != now.get(key):
            yield f"{key} {before.get(key)}, here it is {now.get(key)}"


def _too_few_steps(config: DictConfig, step: int) -> list[str]:
    total = config.warmup + config.steps
    return [] if step < total else [f"a checkpoint {after_steps(step)}, here there are {total}"]


def _cut_lines(folder: Path, count: int) -> bool:
    """Keep the lines of the first `count` steps in metrics.jsonl; false where they are not all there."""
    try:
        lines = (folder / METRICS).read_bytes().splitlines(keepends=True)[:count]
        if [json.loads(line)["step"] for line in lines] != list(range(count)):
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    files.write_bytes(folder / METRICS, b"".join(lines))
    return True


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"model.depth": 3}: a list is a value."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return flat


@dataclass(frozen=True)
class SamePlan:
    """A planner that plans as before. Another profile may lead to other stages, whose sums round differently."""

    before: Plan
    planner: Planner

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """The plan before, unless the request is for another mesh: then the losses agree but for rounding."""
        mesh = self.before.mesh
        if (request.pipeline, request.data, request.tensor) == (mesh.pipeline, mesh.data, mesh.tensor):
            return self.before
        return self.planner.plan(profile, cluster, memory, request)
