"""What happens before a run starts: profile, plan, check, simulate. Problems are collected, and raised all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig

from harness import (
    advice,
    allocation,
    check,
    children,
    clusters,
    costs,
    devices,
    engine_check,
    machine,
    mends,
    planning,
    profile_check,
    profiles,
    registry,
    request,
    srun,
)
from harness.cluster import Cluster
from harness.interfaces import Engine, Planner
from harness.machine import Machine
from harness.planning import Draft
from harness.problem import CannotRun, Problem, noted
from harness.profile import ModelProfile
from harness.profiles import Origin, Profiles
from harness.progress import Progress
from harness.trackers import Tracker

T = TypeVar("T")
PLAN = "plan.json"


@dataclass(frozen=True)
class Prepared:
    """All that is known before the start.

    `values` and `profile` say where the numbers of the cluster and the profile are from ("made just now"), `ranks` how
    many processes train.
    """

    draft: Draft
    kind: devices.Kind
    values: str
    profile: str
    ranks: int
    tracker: Tracker

    def device_names(self, local: bool) -> list[str]:
        """The devices of the plan, by what they are; `local`: as torch calls them."""
        used, cluster = self.draft.plan.devices, self.draft.cluster
        if not local:
            return [cluster.device.name] * len(used)
        names = devices.torch_names(self.kind, max(used) + 1, cluster.devices_per_node)
        return [names[device] for device in used]


def prepare(
    config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress,
    planning_by: Callable[[Planner], Planner] = lambda planner: planner,
) -> Prepared:  # fmt: skip
    """Profile, plan, check and simulate; writes `profile.json` and `plan.json` into the run's folder.

    `planning_by` may put another planner in the place of the configured one.

    Raises `CannotRun` with everything that is wrong, and `ChildFailed` if measuring or profiling fails.
    """
    return _Preparation(config, overrides, folder, progress).go(planning_by)


@dataclass(frozen=True)
class Ground:
    """What a plan rests on; `values` and `origin` say where the numbers of cluster and profile are from."""

    cluster: Cluster
    profile: ModelProfile
    values: str
    origin: str


def ground(config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> Ground:
    """Cluster and profile alone: no engine and no planner has a say. Writes `profile.json`; raises as `prepare`."""
    return _Preparation(config, overrides, folder, progress).ground()


class _Preparation:
    def __init__(self, config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> None:
        self.config, self.overrides, self.folder, self.progress = config, overrides, folder, progress
        self.title = request.title(config, overrides)
        self.profiles = Profiles(config, overrides, folder, progress)
        self.machine = _stored_machine(config)
        self.problems: list[Problem] = []

    def go(self, planning_by: Callable[[Planner], Planner]) -> Prepared:
        config = self.config
        known = self.collect(self.cluster)
        engine: Engine = self.needed(lambda: registry.build("engine", config.engine))
        planner: Planner = planning_by(self.needed(lambda: registry.build("planner", config.planner)))
        tracker: Tracker = self.needed(lambda: registry.build("tracker", config.tracker))
        if known:
            check.fill(config, engine.capabilities, known.devices)
        self.problems += engine_check.early(config, engine, known)
        cluster, profile = self.profiled(known)
        self.problems += profile_check.against_profile(config, engine.capabilities, profile, self.model_given)
        self.compare()
        mesh = planning.mesh(config, engine, profile, cluster)
        self.progress.phase("planning", f"{config.planner.name}, {mesh.size} of {cluster.devices} devices")
        draft = self.collect(lambda: planning.draft(config, engine, planner, profile, cluster))
        if draft:
            self.check_memory(draft, profile)
        self.stop()
        assert draft
        for note in engine.notes(draft.plan, profile, cluster, draft.memory):
            self.progress.note(noted(note))
        draft.plan.save(self.folder / PLAN)
        kind = devices.detect(profiles.wanted(config)).kind
        ranks = draft.devices if engine.capabilities.ranks else 1
        return Prepared(draft, kind, self.values, self.profiles.found, ranks, tracker)

    def ground(self) -> Ground:
        known = self.collect(self.cluster)
        self.problems += check.profiling(self.config)
        cluster, profile = self.profiled(known)
        if self.config.profile:
            self.problems += profile_check.stored(self.config, profile, self.model_given)
        self.compare()
        self.stop()
        return Ground(cluster, profile, self.values, self.profiles.found)

    def collect(self, build: Callable[[], T]) -> T | None:
        """What `build` returns; its problems join the others."""
        try:
            return build()
        except CannotRun as error:
            self.problems += error.problems
        return None

    def needed(self, build: Callable[[], T]) -> T:
        """`collect` for what the other checks cannot do without."""
        built = self.collect(build)
        if built is None:
            self.stop()
            raise AssertionError("what cannot be built has problems")
        return built

    def stop(self) -> None:
        """Raise all problems so far, if there are any."""
        if self.problems:
            raise CannotRun(mends.told_once(self.problems), self.title)

    @property
    def model_given(self) -> bool:
        return request.given(self.overrides, "model")

    def cluster(self) -> Cluster:
        """The cluster, with what is known of this machine."""
        return clusters.build(clusters.of(self.config.cluster), self.machine, srun.job(self.config))

    @property
    def values(self) -> str:
        """Where the numbers of the cluster are from."""
        config = self.config.cluster
        if config.name != "local":
            return str(config["values"])  # .values is a method
        return "measured" if self.machine else "nominal"

    def profiled(self, known: Cluster | None) -> tuple[Cluster, ModelProfile]:
        """The cluster and the profile; what is measured for them is measured now if nothing speaks against the run."""
        cluster = known or self.needed(self.cluster)
        origin = profiles.origin(self.config, cluster)
        if self.machine is None and self.needs_machine(origin):
            self.stop()
            self.machine = self.measured_machine()
            cluster = self.needed(self.cluster)
        if not self.profiles.is_there(origin):
            self.stop()
        here = self.machine.device if self.machine else None
        raw = self.needed(lambda: self.profiles.raw(origin, here))
        profile = self.needed(lambda: self.profiles.priced(raw, cluster))
        if doubt := self.profiles.doubt(profile):
            self.progress.note(noted(doubt))
        return cluster, profile

    def needs_machine(self, origin: Origin) -> bool:
        """A stored profile is simulated without knowing this machine, unless its times shall be this machine's."""
        config = self.config
        local = config.cluster.name == "local"
        if origin != "file" or config.mode == "run":
            return local or origin == "measured"
        timeless = config.costs == "auto" and not costs.has_times(self.needed(lambda: profiles.stored(config.profile)))
        return local and (timeless or config.costs in ("scaled", "analytic"))

    def measured_machine(self) -> Machine:
        """By a child, once; kept for later runs."""
        wanted = profiles.wanted(self.config)
        self.progress.phase("measuring this machine", "once: peaks, memory, links")
        return children.measured_machine(self.folder, self.title, self.config.launch.timeout_s, wanted)

    def compare(self) -> None:
        """A stored profile with the model that the user chose, if all is well so far; no other one is planned for."""
        if self.config.profile and self.model_given and not self.problems:
            self.collect(self.profiles.compare)
            self.stop()

    def check_memory(self, draft: Draft, profile: ModelProfile) -> None:
        """A device without the memory for its part is a problem; the first one has a mend that was tried."""
        peaks = draft.plan.predicted["peak_memory_bytes"]
        found = check.of_memory(draft.plan, peaks, draft.cluster, draft.memory)
        if found:
            found[0] = replace(found[0], mend=advice.mend(self.config, profile, draft.cluster))
        self.problems += found


def _stored_machine(config: DictConfig) -> Machine | None:
    """What is known of this machine; without torch, which it is measured with, nothing is."""
    try:
        return machine.stored(profiles.wanted(config), config.remeasure)
    except PackageNotFoundError:
        return None


Expected = Callable[[DictConfig], allocation.Allocation]
"""What a configuration will find where it runs: the job that it will be part of."""


def request_problems(config: DictConfig, overrides: Sequence[str], expected: Expected | None = None) -> list[Problem]:
    """What cluster and engine have against a configuration in which values may be out of range.

    For a user who is told of those anyway: a check that such a value makes impossible is left out.
    """
    profiles.follow(config, overrides)
    with allocation.expecting(_possible(lambda: expected(config), []) if expected else None):
        return _against_request(config)


def _against_request(config: DictConfig) -> list[Problem]:
    found: list[Problem] = []
    cluster = _possible(lambda: clusters.build(clusters.of(config.cluster), job=srun.job(config)), found)
    if config.mode in ("profile", "calibrate"):
        return found + (_possible(lambda: check.profiling(config), found) or [])
    engine: Engine | None = _possible(lambda: registry.build("engine", config.engine), found)
    if engine:
        built = engine
        found += _possible(lambda: engine_check.early(config, built, cluster), found) or []
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
