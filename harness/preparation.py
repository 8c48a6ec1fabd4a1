"""What happens before a run starts: profile, plan, check, predict. Problems are collected, and raised all at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from harness import check, clusters, devices, launch, memory, profile_cache, registry
from harness.cluster import Cluster
from harness.clusters import ClusterConfig
from harness.display import Progress
from harness.interfaces import BatchShape, Engine, Planner, PlanRequest
from harness.launch import Outcome
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.predict import predict
from harness.problem import CannotRun, NoPlan, Problem
from harness.profile import ModelProfile
from harness.serial import SchemaError
from harness.trackers import Tracker

T = TypeVar("T")
PROFILE = "profile.json"
PLAN = "plan.json"


class RanksFailed(Exception):
    """The processes that were started did not end well; carries the `Outcome`."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.reason)


@dataclass(frozen=True)
class Prepared:
    """All that is known before the start. `plan.predicted` holds the planner's figures and the prediction's."""

    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    kind: devices.Kind
    tracker: Tracker


def prepare(config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> Prepared:
    """Profile, plan, check and predict; writes `profile.json` and `plan.json` into the run's folder.

    Raises `CannotRun` with everything that is wrong, and `RanksFailed` if profiling fails.
    """
    return _Preparation(config, overrides, folder, progress).go()


class _Preparation:
    def __init__(self, config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> None:
        self.config, self.overrides, self.folder, self.progress = config, overrides, folder, progress
        self.title = title(config, overrides)
        self.found = devices.detect(config.cluster.device if config.cluster.name == "local" else "auto")
        self.problems: list[Problem] = []

    def go(self) -> Prepared:
        config = self.config
        cluster = self.collect(lambda: clusters.build(ClusterConfig(**config.cluster)))
        engine: Engine = self.needed(lambda: registry.build("engine", config.engine))
        planner: Planner = self.needed(lambda: registry.build("planner", config.planner))
        tracker: Tracker = self.needed(lambda: registry.build("tracker", config.tracker))
        self.problems += check.request(config, engine.capabilities, cluster)
        if cluster is None:
            self.stop()
            raise AssertionError("a cluster that cannot be built has problems")
        profile = self.profile(cluster)
        self.problems += check.against_profile(config, engine.capabilities, profile, self.model_given)
        plan = self.plan(engine, planner, profile, cluster)
        self.stop()
        plan.save(self.folder / PLAN)
        return Prepared(plan, profile, cluster, self.found.kind, tracker)

    def collect(self, build: Callable[[], T]) -> T | None:
        """What `build` returns; its problems join the others."""
        try:
            return build()
        except CannotRun as error:
            self.problems += error.problems
        except NoPlan as error:
            self.problems.append(error.problem)
        return None

    def needed(self, build: Callable[[], Any]) -> Any:
        """`collect` for what the other checks cannot do without."""
        built = self.collect(build)
        if built is None:
            self.stop()
        return built

    def stop(self) -> None:
        """Raise all problems so far, if there are any."""
        if self.problems:
            raise CannotRun(check.told_once(self.problems), self.title)

    @property
    def model_given(self) -> bool:
        return any(text.startswith(("model=", "model.")) for text in self.overrides)

    def profile(self, cluster: Cluster) -> ModelProfile:
        """From the file that was given, from the cache, or measured now if nothing speaks against the run so far."""
        config = self.config
        if config.profile:
            return self.needed(self.stored)
        place = self.cached(samples := check.micro_batch(config))
        profile = profile_cache.load(place)
        if profile is None:
            self.stop()
            profile = self.measured(samples)
            profile_cache.store(place, profile)
        profile.save(self.folder / PROFILE)
        return profile

    def cached(self, samples: int) -> Path:
        """Where the profile for micro-batches of `samples` on this machine is kept."""
        config = self.config
        model: Any = OmegaConf.to_container(config.model, resolve=True)
        dtype, autocast = config.precision.dtype, config.precision.autocast
        return profile_cache.path(model, _source(config.model.name), samples, dtype, self.found.name, autocast)

    def stored(self) -> ModelProfile:
        config = self.config
        try:
            profile = ModelProfile.load(Path(config.profile))
        except (SchemaError, OSError) as error:
            raise CannotRun([Problem(f"profile {config.profile}", str(error))]) from error
        profile.save(self.folder / PROFILE)
        return profile

    def measured(self, samples: int) -> ModelProfile:
        """Measured on this machine by a process of its own, so that this one needs no torch."""
        self.progress.phase("profiling", f"{self.title}, micro-batches of {samples}")
        command = [*rank_command(self.folder), "profile", str(samples)]
        outcome = launch.supervise([command], self.folder, self.config.launch.timeout_s)
        raise_unless_ok(outcome, self.title)
        return ModelProfile.load(self.folder / PROFILE)

    def plan(self, engine: Engine, planner: Planner, profile: ModelProfile, cluster: Cluster) -> Plan:
        """The plan, checked by the engine and with its prediction."""
        config = self.config
        optimizer = config.optimizer
        model = memory.named(config.memory, optimizer.name, optimizer.momentum)
        mesh = check.resolve(config, engine.capabilities, cluster.devices, len(profile.layers))
        shape = BatchShape(config.batch.size, config.batch.micro_batches)
        recompute = config.engine.get("checkpoint", "never")
        request = PlanRequest(shape, mesh.pipeline, mesh.data, mesh.tensor, recompute)
        self.progress.phase("planning", f"{config.planner.name}, {mesh.size} of {cluster.devices} devices")
        plan: Plan = self.needed(lambda: planner.plan(profile, cluster, model, request))
        refused = check.of_plan(config, plan, mesh, len(profile.layers)) or engine.check(plan, profile, cluster, model)
        self.problems += refused
        return plan if refused else self.predicted(engine, plan, profile, cluster, model)

    def predicted(
        self, engine: Engine, plan: Plan, profile: ModelProfile, cluster: Cluster, model: MemoryModel
    ) -> Plan:
        """The plan with its prediction; a device without the memory for it is a problem."""
        figures, _ = predict(engine.schedule(plan, profile), plan, profile, cluster, model)
        self.problems += check.of_memory(self.config, plan, figures["peak_memory_bytes"], cluster, model)
        return replace(plan, predicted={**plan.predicted, **figures})


def request_problems(config: DictConfig, overrides: Sequence[str]) -> list[Problem]:
    """What cluster and engine have against a configuration in which values may be out of range.

    For a user who is told of those anyway: a check that such a value makes impossible is left out.
    """
    follow_profile(config, overrides)
    found: list[Problem] = []
    cluster = _possible(lambda: clusters.build(ClusterConfig(**config.cluster)), found)
    engine: Engine | None = _possible(lambda: registry.build("engine", config.engine), found)
    if engine:
        can = engine.capabilities
        found += _possible(lambda: check.request(config, can, cluster), found) or []
    return found


def _possible(build: Callable[[], T], found: list[Problem]) -> T | None:
    """What `build` returns; None, and its problems in `found`, if a value keeps it from that."""
    try:
        return build()
    except CannotRun as error:
        found += error.problems
    except (ValueError, ArithmeticError):
        pass  # the value has been told of
    return None


def follow_profile(config: DictConfig, overrides: Sequence[str]) -> None:
    """With a stored profile, `batch.size` follows from its micro-batches unless it is given."""
    if not config.profile or any(text.startswith("batch.size=") for text in overrides):
        return
    with suppress(SchemaError, OSError):  # `prepare` tells
        config.batch.size = check.batch_size(config, ModelProfile.load(Path(config.profile)))


def choices(config: DictConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Engine, model and cluster as the user chose them: unet_5_64 and not unet, which it configures.

    With a stored profile and no model, the model is the profile's.
    """
    chosen = dict(text.split("=", 1) for text in overrides if "=" in text)
    if config.profile:
        chosen.setdefault("model", Path(config.profile).stem)
    return {group: chosen.get(group, config[group].name) for group in ("engine", "model", "cluster")}


def title(config: DictConfig, overrides: Sequence[str]) -> str:
    """The run in the user's words: engine=gpipe model=unet_5_64 cluster=flat."""
    chosen = choices(config, overrides).items()
    return " ".join(f"{group}={name}" for group, name in chosen if (group, name) != ("cluster", "local"))


def rank_command(folder: Path) -> list[str]:
    """The command of a rank of the run in `folder`, but for what it shall do.

    -P: a module in the user's folder does not hide one of this project.
    """
    return [sys.executable, "-P", "-m", "harness.rank", str(folder)]


def raise_unless_ok(outcome: Outcome, title: str) -> None:
    """Raise `CannotRun` for problems that only a rank could find, `RanksFailed` for all other ends."""
    if outcome.problems:
        raise CannotRun(outcome.problems, title)
    if outcome.status != "ok":
        raise RanksFailed(outcome)


def _source(model: str) -> Path:
    """Where the model's source lies: its package, or its module."""
    path = next(plugin.path for plugin in registry.scan() if (plugin.group, plugin.name) == ("model", model))
    return path.parent if path.name == "config.py" else path
