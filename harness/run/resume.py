"""Whether a run resumes where an earlier start in its folder ended: from which checkpoint, with which plan.

It resumes from a checkpoint of the same configuration; `FREE` keys may differ, and there may be more steps. All that it
needs is in the checkpoint: other files may be damaged. Without a checkpoint steps that are trained are replaced by the
same run alone, if that is not finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config import registry
from harness.core import files
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import CannotRun, Fix, Problem, spelled
from harness.core.record import RunRecord
from harness.core.run_files import CONFIG, METRICS, PLAN, RECORD
from harness.core.serialization import SchemaError, finite
from harness.interfaces import Planner, PlanRequest
from harness.run import checkpoint_files, stored_record
from harness.run.checkpoint_files import RunState, Unusable, after_steps

FREE = ("launch", "tracker", "out", "overwrite", "race")
"""Keys that may differ: the losses do not depend on them."""
FIRST = ("engine", "model")
"""Where many keys differ these say most, and then those that both have."""
NAMED = 5


@dataclass(frozen=True)
class Resumed:
    """The run up to the checkpoint, its plan, after how many steps it has resumed before, and which checkpoints are of
    no use."""

    state: RunState
    plan: Plan | None
    before: tuple[int, ...] = ()
    unusable: tuple[int, ...] = ()

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def steps(self) -> list[int]:
        """For the manifest: after how many steps each start since the first has resumed."""
        return [*self.before, self.step]


def find_finished(folder: Path, config: DictConfig) -> RunRecord | None:
    """The record in a folder if this run, with these steps, has trained to its end, and is not to train again."""
    if config.mode != "run" or config.overwrite:
        return None
    try:
        record = stored_record.read(folder)
    except (OSError, SchemaError):
        return None
    if record.status != "ok" or not record.config or _differences(record.config, config, record.plan):
        return None
    return record if record.config.get("steps") == config.steps else None


def find_resumable(folder: Path, config: DictConfig, say: Callable[[str], None], title: str) -> Resumed | None:
    """Find the checkpoint to resume from; None if there is none. `say` gets the damaged files; nothing is changed.

    Raises CannotRun if the folder has a checkpoint that can be used, but not by this run, unless it may overwrite it.
    """
    if config.mode != "run":
        return None
    unusable: list[int] = []
    for step in checkpoint_files.steps(folder):
        try:
            state = checkpoint_files.read(folder, step)
            plan = Plan.from_json(state.plan) if state.plan else None
        except (Unusable, SchemaError) as error:
            say(f"{checkpoint_files.place(folder, step)} {error}: it is not used")
            unusable.append(step)
            continue
        total = config.warmup + config.steps
        differences = _differences(state.config, config, state.plan)
        if _done(folder, state) > total:
            differences["steps"] = (state.config.get("steps"), config.steps)
        if differences and not config.overwrite:
            raise CannotRun([_of_another_run(config.out, step, differences)], title)
        if differences or (config.overwrite and step == total):
            return None
        if damaged := _damaged(folder, state):
            say(f"damaged or missing: {', '.join(damaged)}; the checkpoint {after_steps(step)} has what is needed")
        return Resumed(state, plan, _before(folder, state), tuple(unusable))
    return None


def refuse_to_replace(folder: Path, config: DictConfig, say: Callable[[str], None], title: str) -> None:
    """Raise CannotRun if a run that cannot resume would replace steps that are trained, unless it may overwrite them.

    Of the same run, if that is not finished, they may be trained again: `say` gets that they are.
    """
    done = trained_steps(folder)
    if config.mode != "run" or config.overwrite or not (done or checkpoint_files.steps(folder)):
        return
    record = _load_or_none(RunRecord, folder / RECORD)
    finished = is_finished(record)
    differences = _differences(record.config, config, record.plan) if record is not None and record.config else {}
    if done and (record is None or finished or differences):
        what = "a finished run" if finished else "a run" if record is not None else "a run without a readable record"
        which = f" with {_spelled(differences)}" if differences else ""
        message = f"holds {what} that has ended {after_steps(done)}{which}, and no checkpoint to resume from"
        raise CannotRun([_occupied(config.out, message)], title)
    say(f"there is no checkpoint to resume from: the run, which had ended {after_steps(done)}, begins again")


def say_what_is_replaced(folder: Path, config: DictConfig, say: Callable[[str], None]) -> None:
    """`say` that a result is replaced that no training is in, of other keys: it is soon made again."""
    record = _load_or_none(RunRecord, folder / RECORD)
    if record is None or record.status != "ok" or is_finished(record) or config.overwrite:
        return
    differences = _differences(record.config, config, record.plan)
    others = {key: both for key, both in differences.items() if key != "mode"}
    if differences:
        which = f", with {_spelled(others)}" if others else ""
        say(f"replaces the result of mode={record.config.get('mode')} in {folder}{which}")


def trained_steps(folder: Path) -> int:
    """The steps that the run in a folder has trained, warm-up included: as its metrics.jsonl has them, or its record
    if it is finished."""
    record = _load_or_none(RunRecord, folder / RECORD)
    if record is not None and is_finished(record) and (total := _total(record)):
        return total
    try:
        return files.read_bytes(folder / METRICS, None).count(b"\n")
    except OSError:
        return 0


def is_finished(record: RunRecord | None) -> bool:
    """Whether a run has trained to its end."""
    return record is not None and record.status == "ok" and record.config.get("mode") == "run"


def _total(record: RunRecord) -> int:
    """The steps that a run was to train; 0 where its record does not say so, since somebody has changed it."""
    numbers = (record.config.get(key) for key in ("warmup", "steps"))
    return sum(number for number in numbers if isinstance(number, int))


def _load_or_none(kind: Any, path: Path) -> Any:
    try:
        return kind.load(path)
    except (OSError, SchemaError):
        return None


def _done(folder: Path, state: RunState) -> int:
    """The steps that the run has done: more than the checkpoint's, if it is finished."""
    record = _load_or_none(RunRecord, folder / RECORD)
    finished = record is not None and record.status == "ok" and record.id == state.id
    return max(_total(record), state.step) if record is not None and finished else state.step


def _differences(before: dict[str, Any], config: DictConfig, plan: dict[str, Any] | None) -> dict[str, tuple[Any, Any]]:
    """The keys whose values are others than before, with both; `steps` apart. A key that was not there then had its
    default: the run is of an earlier version. Degrees that nobody gave then are those of the plan where they are given
    now, and other names of keys are none."""
    now = _flat(finite(OmegaConf.to_container(config, resolve=True)))
    earlier = {key: value for key, value in _defaults(config, before).items() if key in now} | _flat(before)
    for degree, size in ((plan or {}).get("mesh") or {}).items():
        if earlier.get(key := f"mesh.{degree}") is None and now.get(key) is not None:
            earlier[key] = size
    schema = registry.schemas().get(("engine", config.engine.name))
    others = {"steps", "batch.micro_batch_size", *(f"engine.{name}" for name in getattr(schema, "DEGREES", {}))}
    known = (key for key in sorted((earlier.keys() | now.keys()) - others) if key.partition(".")[0] not in FREE)
    return {key: (earlier.get(key), now.get(key)) for key in known if earlier.get(key) != now.get(key)}


def _defaults(config: DictConfig, before: dict[str, Any]) -> dict[str, Any]:
    """The values of all keys that are not given; of the groups (`engine=ddp`) those whose choice is as before."""
    same = {}
    for group in map(str, config):
        node, earlier = config[group], before.get(group)
        name = node.get("name") if isinstance(node, DictConfig) else None
        if isinstance(earlier, dict) and earlier.get("name") == name:
            same[group] = str(name)
    return _flat(finite(registry.default_keys(same)))


def _of_another_run(out: str, step: int, differences: dict[str, tuple[Any, Any]]) -> Problem:
    return _occupied(out, f"holds a checkpoint {after_steps(step)} of a run with {_spelled(differences)}")


def _occupied(out: str, message: str) -> Problem:
    fixes: tuple[Fix, ...] = ({"out": f"{out}-2"}, {"overwrite": True})
    return Problem("out", out, message, fixes)


def _spelled(found: dict[str, tuple[Any, Any]]) -> str:
    """What the user can give: of a group with another choice that choice alone, from which its other keys follow."""
    chosen = [group for group in registry.GROUPS if f"{group}.name" in found]
    differences = {key: both for key, both in found.items() if key.partition(".")[0] not in chosen}
    differences |= {group: found[f"{group}.name"] for group in chosen}
    keys = sorted(differences, key=lambda key: (key not in FIRST, None in differences[key], key))
    named = keys if len(keys) <= NAMED else keys[:NAMED]
    texts = [f"{key} {spelled(differences[key][0])} (here {spelled(differences[key][1])})" for key in named]
    texts += [f"{len(keys) - NAMED} more"] if len(keys) > NAMED else []
    return ", ".join(texts)


def _damaged(folder: Path, state: RunState) -> list[str]:
    """The files of the run that are not what the checkpoint says they were."""
    return [name for name, whole in _FILES.items() if not whole(folder, state)]


def _record_is_whole(folder: Path, state: RunState) -> bool:
    record = _load_or_none(RunRecord, folder / RECORD)
    return record is not None and record.id == state.id


def _plan_is_whole(folder: Path, state: RunState) -> bool:
    return state.plan is None or _load_or_none(Plan, folder / PLAN) is not None


def _config_is_whole(folder: Path, state: RunState) -> bool:
    try:
        found = OmegaConf.create(files.read_bytes(folder / CONFIG).decode())
        return isinstance(found, DictConfig) and not _differences(state.config, found, None)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return False


def _metrics_are_whole(folder: Path, state: RunState) -> bool:
    """A run that was killed may have left one line less than the checkpoint has, and other lines after its last."""
    try:
        text = files.read_bytes(folder / METRICS, None).decode()
    except (OSError, ValueError):
        return False
    lines = tuple(text[: text.rfind("\n") + 1].splitlines()[: state.step])
    return len(lines) >= state.step - 1 and lines == state.lines[: len(lines)]


_FILES: dict[str, Callable[[Path, RunState], bool]] = {
    RECORD: _record_is_whole,
    CONFIG: _config_is_whole,
    PLAN: _plan_is_whole,
    METRICS: _metrics_are_whole,
}


def _before(folder: Path, state: RunState) -> tuple[int, ...]:
    """After how many steps the run has resumed before: its record knows of starts that made no checkpoint."""
    record = _load_or_none(RunRecord, folder / RECORD)
    known = record if record is not None and record.id == state.id else state
    found = known.manifest.get("resumed", [])
    return tuple(found) if isinstance(found, list) else ()


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
