"""Prepare a run: profile, plan, check, simulate. Problems are collected and raised all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig

from harness.checks import engine_support, micro_batches, plan_fits, profile_match, request, stored_profile
from harness.checks.mesh import fill
from harness.config import cluster_config, registry
from harness.config.overrides import given, title
from harness.core.cluster import Cluster
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun, Problem, deduplicate, leaving_out, note, refuse
from harness.core.run_files import PLAN, PROFILE
from harness.export import systems
from harness.export.planned import Planned
from harness.host import devices, machine, one_at_a_time
from harness.host.machine import Machine
from harness.interfaces import Engine, Planner
from harness.launch import rank_starter, supervisor
from harness.planning import alternatives, contents, engine_costs, memory_advice, profiles
from harness.planning import draft as planning_draft
from harness.planning.alternatives import Alternative
from harness.planning.draft import Draft
from harness.planning.profiles import Origin, Profiles
from harness.report.progress import Progress
from harness.simulator import layer_times
from harness.trackers import Tracker

T = TypeVar("T")
MEASURED = {
    "all": "peaks, memory, links, processes",
    "threads": "peaks, memory, links",
    "processes": "what processes call, and the cores that they share",
}
"""What is measured of a machine with the parts of `supervisor.measure_machine`."""


@dataclass(frozen=True)
class Prepared:
    """All that is known before the start.

    `values` and `profile` say where the numbers of the cluster and the profile are from ("made just now"), `ranks` how
    many processes train, `multi_process` whether those are ranks that another one starts. `exported` is what another
    system gets, if one does. `alternatives` are settings that were compared: `draft` is that of the first one.
    """

    draft: Draft
    kind: devices.Kind
    values: str
    profile: str
    ranks: int
    multi_process: bool
    tracker: Tracker
    exported: Planned | None = None
    alternatives: Sequence[Alternative] = ()

    def device_names(self, local: bool) -> list[str]:
        """The devices of the plan, by what they are; `local`: as torch calls them."""
        used, cluster = self.draft.plan.devices, self.draft.cluster
        if not local:
            return [cluster.device.name] * len(used)
        names = devices.torch_names(self.kind, max(used) + 1, cluster.devices_per_node)
        return [names[device] for device in used]


def prepare(
    config: DictConfig,
    overrides: Sequence[str],
    folder: Path,
    progress: Progress,
    planning_by: Callable[[Planner], Planner] = lambda planner: planner,
) -> Prepared:
    """Profile, plan, check and simulate; writes `profile.json` and `plan.json` into the run's folder.

    `planning_by` may put another planner in the place of the configured one.

    Raises `CannotRun` with everything that is wrong, and `WorkerFailed` if measuring or profiling fails.
    """
    return _Preparation(config, overrides, folder, progress).prepare(planning_by)


@dataclass(frozen=True)
class Ground:
    """Inputs of a plan: cluster and profile, with the sources of their numbers in `values` and `origin`."""

    cluster: Cluster
    profile: ModelProfile
    values: str
    origin: str


def ground(
    config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress, ahead: Iterable[DictConfig] = ()
) -> Ground:
    """Cluster and profile alone: no engine and no planner has a say. Raises as `prepare`.

    Profiles of `ahead` may be made and cached in the same process."""
    return _Preparation(config, overrides, folder, progress, ahead).ground()


class _Preparation:
    def __init__(
        self,
        config: DictConfig,
        overrides: Sequence[str],
        folder: Path,
        progress: Progress,
        ahead: Iterable[DictConfig] = (),
    ) -> None:
        self.config, self.overrides, self.folder, self.progress = config, overrides, folder, progress
        self.title = title(config, overrides)
        self.profiles = Profiles(config, overrides, folder, progress, ahead)
        self.machine = _stored_machine(config)
        self.several = False
        """Whether the engine's devices are processes, so that the machine is measured for these, too."""
        self.problems: list[Problem] = []

    def prepare(self, planning_by: Callable[[Planner], Planner]) -> Prepared:
        """Prepare the run: build its parts, profile, plan, check and simulate."""
        config = self.config
        known = self.collect(self.cluster)
        engine: Engine = self.needed(lambda: registry.build("engine", config.engine))
        self.several = engine.capabilities.multi_process
        configured: Planner = self.needed(lambda: registry.build("planner", config.planner))
        planner = planning_by(configured)
        tracker: Tracker = self.needed(lambda: registry.build("tracker", config.tracker))
        if known:
            fill(config, engine.capabilities, known.devices)
        self.problems += engine_support.early(config, engine, known)
        cluster, profile = self.profiled(known)
        profile.save(self.folder / PROFILE)
        self.problems += profile_match.against_profile(
            config, engine.capabilities, profile, cluster.devices, self.model_given
        )
        self.compare(profile)
        cluster = self.with_engine(cluster, profile)
        mesh = planning_draft.mesh(config, engine, profile, cluster)
        self.progress.phase("planning", f"{config.planner.name}, {mesh.size} of {cluster.devices} devices")
        resumed = planner is not configured  # the plan is there, and with it what was chosen
        others = [] if resumed else alternatives.compared(config, engine, planner, profile, cluster)
        draft: Draft | None
        if others and others[0].draft and others[0].engine:
            draft, engine = others[0].draft, others[0].engine
        else:
            draft = self.collect(lambda: planning_draft.draft(config, engine, planner, profile, cluster))
        if draft:
            self.check_memory(draft, profile)
        exported = Planned(config, draft.plan, profile, draft.schedule) if draft and config.export else None
        if exported:
            self.problems += systems.refused(exported)
        self.stop()
        assert draft
        if profile.unsplit:
            self.progress.note(note(Problem("model", profile.model, f"is one layer: {profile.unsplit.text}")))
        for remark in (
            *request.notes(config, engine.capabilities),
            *plan_fits.idle(draft.plan),
            *plan_fits.frozen(draft.plan, draft.profile),
            *engine.notes(draft.plan, profile, cluster, draft.memory),
        ):
            self.progress.note(note(remark))
        draft.plan.save(self.folder / PLAN)
        kind = devices.detect(profiles.wanted(config)).kind
        several = engine.capabilities.multi_process
        ranks = draft.devices if several else 1
        return Prepared(draft, kind, self.values, self.profiles.found, ranks, several, tracker, exported, others)

    def ground(self) -> Ground:
        known = self.collect(self.cluster)
        self.problems += request.profiling(self.config)
        engine = self.collect(lambda: registry.build("engine", self.config.engine))
        self.several = self.predicts and bool(engine and engine.capabilities.multi_process)
        cluster, profile = self.profiled(known)
        if self.config.profile:
            self.problems += profile_match.stored(self.config, profile, self.model_given)
        self.compare(profile)
        self.stop()
        cluster = self.with_engine(cluster, profile)
        return Ground(cluster, profile, self.values, self.profiles.found)

    def collect(self, build: Callable[[], T]) -> T | None:
        """Return the result of `build`, or None after adding its problems to the others."""
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
        problems = plan_fits.with_value(self.problems, self.config, self.overrides)
        problems = micro_batches.in_given_keys(problems, self.config)
        refuse(leaving_out(deduplicate(problems), self.overrides), self.title)

    @property
    def model_given(self) -> bool:
        return given(self.overrides, "model")

    def cluster(self) -> Cluster:
        """The cluster, with what is known of this machine."""
        return cluster_config.build(
            cluster_config.from_group(self.config.cluster), self.machine, rank_starter.nodes(self.config)
        )

    @property
    def values(self) -> str:
        """Return the source of the cluster's numbers."""
        config = self.config.cluster
        if config.name != "local":
            return str(config["values"])  # .values is a method
        return "measured" if self.machine else "nominal"

    def profiled(self, known: Cluster | None) -> tuple[Cluster, ModelProfile]:
        """The cluster and the profile; what is measured for them is measured now if nothing speaks against the run."""
        cluster = known or self.needed(self.cluster)
        origin = profiles.origin(self.config, cluster)
        if self.needs_machine(origin) if self.machine is None else not self.knows_enough(self.machine):
            self.stop()
            self.machine = self.measured_machine()
            cluster = self.needed(self.cluster)
        if not self.profiles.is_there(origin):
            self.stop()
        here = self.machine.device if self.machine else None
        raw = self.needed(lambda: self.profiles.raw(origin, here))
        profile = self.needed(lambda: self.profiles.priced(raw, cluster))
        if doubt := self.profiles.doubt(profile):
            self.progress.note(note(doubt))
        return cluster, profile

    def with_engine(self, cluster: Cluster, profile: ModelProfile) -> Cluster:
        """The cluster with what the engine takes on it, which is measured now if nothing speaks against the run."""
        if self.problems or not self.machine or not engine_costs.count(self.config, profile):
            return cluster
        config, folder = self.config, self.folder
        return engine_costs.with_costs(config, cluster, profile, self.machine, folder, self.title, self.progress)

    @property
    def predicts(self) -> bool:
        """Whether an engine's step is predicted: a profile alone is of no engine."""
        return bool(self.config.mode != "profile")

    def needs_machine(self, origin: Origin) -> bool:
        """A stored profile is simulated without knowing this machine, unless its times shall be this machine's."""
        config = self.config
        local = config.cluster.name == "local"
        if origin != "file" or config.mode == "run":
            return local or origin == "measured"
        timeless = config.costs == "auto" and not layer_times.has_times(
            self.needed(lambda: stored_profile.stored(config.profile))
        )
        return local and (timeless or config.costs in ("scaled", "analytic"))

    def knows_enough(self, known: Machine | None) -> bool:
        """Whether all of this machine that the engine uses is measured."""
        several = self.several and self.config.cluster.name == "local"
        return known is not None and (known.knows_processes or not several)

    def measured_machine(self) -> Machine:
        """Measure this machine in a worker process, once, and cache it for later runs; what processes do, when the
        first engine needs it."""
        wanted = profiles.wanted(self.config)
        tf32, limit_s = self.config.precision.tf32, self.config.launch.timeout_s
        with one_at_a_time.alone(one_at_a_time.MEASURING, self.progress.phase):
            known = _stored_machine(self.config)
            if known and self.knows_enough(known):
                return known
            whole = self.several or (self.predicts and self.config.remeasure)
            parts = "processes" if known else "all" if whole else "threads"
            self.progress.phase("measuring this machine", f"once: {MEASURED[parts]}")
            return supervisor.measure_machine(self.folder, self.title, limit_s, wanted, tf32, parts)

    def compare(self, profile: ModelProfile) -> None:
        """A stored profile with the model that the user chose, if all is well so far; no other one is planned for."""
        if self.config.profile and self.model_given and not self.problems:
            profile.save(self.folder / PROFILE)  # a worker reads it there
            self.collect(self.profiles.compare)
            self.stop()

    def check_memory(self, draft: Draft, profile: ModelProfile) -> None:
        """Devices without the memory for their parts are a problem, with a fix that was tried."""
        peaks = draft.plan.predicted["peak_memory_bytes"]
        held = contents.text(contents.fullest(draft.simulation.peaks))
        full = plan_fits.check_memory(draft.plan, peaks, draft.cluster, draft.memory)
        found = [replace(one, message=f"{one.message}: {held}") for one in full]
        self.problems += [memory_advice.advised(one, self.config, profile, draft.cluster) for one in found]


def _stored_machine(config: DictConfig) -> Machine | None:
    """Return the cached measurement of this machine, or None; without torch there is none."""
    try:
        return machine.stored(profiles.wanted(config), config.remeasure, config.precision.tf32)
    except PackageNotFoundError:
        return None
