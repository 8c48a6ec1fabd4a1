"""Get a run's layer times from a file, from the cache, or from a worker that measures or counts; then price them.

profile=FILE ------------------------------.
measured here  (cache, else a worker) ------+--> harness.simulator.layer_times.priced --> profile.json of the run
counted on the meta device  (cache, worker)-'
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from omegaconf import DictConfig

from harness.checks import formats, mesh, profile_match
from harness.checks.stored_profile import TIMES, stored
from harness.config import overrides as config_overrides
from harness.config import registry
from harness.core import units
from harness.core.cluster import Cluster, Device
from harness.core.model_profile import ModelProfile, Unsplit
from harness.core.problem import CannotRun, Problem
from harness.core.run_files import PROFILE
from harness.host import devices, one_at_a_time, profile_cache, run_queue
from harness.launch import supervisor
from harness.report.progress import Progress
from harness.simulator import layer_times

COUNTED = "meta"
"""The device of counted profiles in the cache: they are the same on every machine."""
Origin = Literal["file", "measured", "counted"]


class Profiles:
    """The profile of one run; `folder` is the run's, `here` the device that measures.

    A worker that is started for it may make those of `ahead`, configurations of later runs, too.

    `found` says where the profile is from and how old it is, once it is there: "made here 3 min ago, cached (...)".
    """

    found = ""

    def __init__(
        self,
        config: DictConfig,
        overrides: Sequence[str],
        folder: Path,
        progress: Progress,
        ahead: Iterable[DictConfig] = (),
    ) -> None:
        self.config, self.overrides, self.folder, self.progress = config, overrides, folder, progress
        self.ahead = ahead
        self.places: dict[Origin, Path] = {}
        self.title = config_overrides.title(config, overrides)

    def raw(self, origin: Origin, here: Device | None) -> ModelProfile:
        """The profile as it is stored, measured or counted. `here` is what is known of the device that measures.

        Raises `CannotRun` for a file that cannot be read or is of another model, and for a model that cannot be
        profiled here, `WorkerFailed` for all else that goes wrong in a worker.
        """
        if origin == "file":
            return self.given()
        profile = self.cached(origin) or self.made(origin)
        return replace(profile, device=here) if origin == "measured" else profile

    def cached(self, origin: Origin) -> ModelProfile | None:
        """The profile in the cache, with the name of the file where the model is now. None if there is none, it has to
        be measured again, or it names a line that is elsewhere now."""
        place = self.place(origin)
        profile = profile_cache.load(place) if self.is_there(origin) else None
        if profile is None or (profile.unsplit and not _is_there(profile.unsplit)):
            return None
        again = " (remeasure=true measures again)" if origin == "measured" else ""
        self.found = f"made here {units.age(profile_cache.age_s(place))} ago, cached{again}"
        return replace(profile, model=registry.model_name(self.config.model, profile.model))

    def made(self, origin: Origin) -> ModelProfile:
        """A new profile, for the cache, too; or the one that another process makes at this moment."""
        what = one_at_a_time.MEASURING if origin == "measured" else f"counting-{self.config.model.name}"
        with one_at_a_time.alone(what, self.progress.phase):
            self.__dict__.pop("disturbed", None)  # another process may have measured again
            if profile := self.cached(origin):
                return profile
            place = self.place(origin)
            self.found = "made just now"
            profile = self.in_a_worker(origin)
            profile_cache.store(place, profile)
            if origin == "measured" and self.disturbed:
                profile_cache.mark_repeated(place)
                self.disturbed = False
            return profile

    def given(self) -> ModelProfile:
        """The profile of the user's file. What is wrong with one of another model is raised before it is planned."""
        file, model_given = self.config.profile, config_overrides.given(self.overrides, "model")
        profile = stored(file)
        if profile_match.check_same_model(self.config, profile, model_given):
            raise CannotRun(profile_match.stored(self.config, profile, model_given))
        self.found = f"{file}, {units.age(profile_cache.age_s(Path(file)))} old"
        return profile

    def is_there(self, origin: Origin) -> bool:
        """Whether no worker is needed."""
        if origin == "file":
            return True
        again = self.config.remeasure and origin == "measured"
        return profile_cache.exists(self.place(origin), again) and not (origin == "measured" and self.disturbed)

    @cached_property
    def disturbed(self) -> bool:
        """Whether the times in the cache were measured while other programs kept the cores busy, and should be measured
        again."""
        place = self.place("measured")
        profile = profile_cache.load(place) if profile_cache.may_improve(place) else None
        return profile is not None and profile.slowed >= run_queue.BUSY

    def priced(self, profile: ModelProfile, cluster: Cluster) -> ModelProfile:
        """The profile with the times that `costs` asks for."""
        config = self.config
        described = config.cluster.name != "local"
        own = bool(config.profile) and layer_times.has_times(profile) and config.costs == "auto"
        how = "none" if timeless(config, cluster) and not own else config.costs
        if config.profile and how != "none":
            self.check_costs(profile)
        try:
            return layer_times.with_layer_times(profile, how, cluster.device, described, bool(config.profile))
        except CannotRun as error:
            can = registry.build("engine", config.engine).capabilities
            raise CannotRun(formats.with_instead(error.problems, config, can), error.title) from error

    def doubt(self, profile: ModelProfile) -> Problem | None:
        """A note on a priced profile whose times were measured while this machine did other things, too."""
        if profile.slowed < run_queue.BUSY or profile.times not in ("measured", "scaled"):
            return None
        file = self.config.profile
        key = "profile" if file else f"profile of micro-batches of {profile.micro_batch}"
        message = f"was measured on a busy machine: layers took about {profile.slowed:.2f} times what they take alone"
        hint = "mode=profile remeasure=true where it was made" if file else "remeasure=true"
        return Problem(key, file, message, hint=f"{hint}, while nothing else runs")

    def check_costs(self, profile: ModelProfile) -> None:
        """Raise `CannotRun` for a file of whose layers neither times nor work are known."""
        if not any(getattr(layer, field) for layer in profile.layers for field in (*TIMES, "flops", "bytes_moved")):
            zero = f"has forward_s 0 and backward_s 0 in all {len(profile.layers)} layers, and no work to price them by"
            hint = "forward_s and backward_s in seconds, or flops and bytes_moved, in each layer of the file"
            raise CannotRun([Problem("profile", self.config.profile, zero, hint=hint)])

    def place(self, origin: Origin) -> Path:
        """Return the path of a profile in the cache."""
        if origin not in self.places:
            self.places[origin] = self._place(origin)
        return self.places[origin]

    def _place(self, origin: Origin) -> Path:
        config = self.config
        precision = config.precision
        device = COUNTED if origin == "counted" else devices.detect(wanted(config)).name
        return profile_cache.path(
            registry.identity("model", config.model),
            registry.source("model", config.model),
            mesh.micro_batch(config),
            precision.dtype,
            device,
            precision.autocast,
            precision.tf32 and origin != "counted",
            precision.cudnn_benchmark and origin != "counted",
            precision.channels_last and origin != "counted",
            precision.compile and origin != "counted",
        )

    def in_a_worker(self, origin: Origin) -> ModelProfile:
        """Make a profile in a worker process."""
        samples = mesh.micro_batch(self.config)
        phase, action = ("counting", "count") if origin == "counted" else ("profiling", "profile")
        again = "; again, as the machine was busy the last time" if origin == "measured" and self.disturbed else ""
        self.progress.phase(phase, f"{self.title}, micro-batches of {samples}{again}{self.why_here(origin)}")
        supervisor.run_worker(
            self.folder, self.title, self.config.launch.timeout_s, action, str(samples), *self.later(origin)
        )
        return ModelProfile.load(self.folder / PROFILE)

    def later(self, origin: Origin) -> Iterator[str]:
        """What the worker may make ahead: "8=FILE" for micro-batches of 8, for each that is not in the cache."""
        for config in self.ahead:
            other = Profiles(config, self.overrides, self.folder, self.progress)
            if not other.is_there(origin):
                yield f"{mesh.micro_batch(config)}={other.place(origin)}"

    def why_here(self, origin: Origin) -> str:
        """Profiling may take minutes, and the times are not the cluster's: why, where the user did not ask for it."""
        config = self.config
        if config.costs != "auto" or config.cluster.name == "local" or any(config.cluster.peak_tflops.values()):
            return ""
        fix = f"its data sheet's TFLOP/s as cluster.peak_tflops.{config.precision.autocast or config.precision.dtype}"
        if config.cluster.memory_bandwidth_gb_s is None:
            fix += " and GB/s as cluster.memory_bandwidth_gb_s"
        why = "layers will take no time" if origin == "counted" else "profiling here"
        why += ", since cluster.peak_tflops is not given"
        why += "" if origin == "counted" else ": the layer times will be this machine's"
        return f"; {why} -> {fix}"

    def compare(self) -> None:
        """Raise `CannotRun` if a stored profile is not of the model that the user chose; a worker compares them."""
        self.progress.phase("comparing", f"{self.config.profile} with {self.title}")
        supervisor.run_worker(self.folder, self.title, self.config.launch.timeout_s, "check")


def origin(config: DictConfig, cluster: Cluster) -> Origin:
    """A profile is counted where its times will be computed, for `costs=analytic` or a device with known peaks, and
    where layers take no time."""
    if config.profile:
        return "file"
    described = config.cluster.name != "local"
    analytic = config.costs == "auto" and described and bool(cluster.device.peak_flops)
    return "counted" if analytic or config.costs == "analytic" or timeless(config, cluster) else "measured"


def _is_there(line: Unsplit) -> bool:
    linecache.checkcache(line.file)
    return linecache.getline(line.file, line.line).strip() == line.code


def timeless(config: DictConfig, cluster: Cluster) -> bool:
    """Whether layers take no time: if the user says so, where a trace has it, or where a planner asks for none and no
    peaks are known."""
    if config.trace:
        return True
    if config.costs != "auto":
        return bool(config.costs == "none")
    asks = not registry.splits_matmuls(config.planner.name)
    return not (asks or config.mode != "plan" or config.cluster.name == "local" or cluster.device.peak_flops)


def described(profile: ModelProfile) -> str:
    """A profile in one line."""
    last = len(profile.layers) - 1
    forward, backward, work = (profile.sum(field, 0, last) for field in ("forward_s", "backward_s", "flops"))
    held = profile.parameter_bytes(0, last)
    return (
        f"{profile.model}: {last + 1} layers, {units.size(held)} of parameters; {profile.micro_batch} samples: "
        f"{work / 1e9:.4g} GFLOP forward, {units.seconds(forward)} forward, {units.seconds(backward)} backward; "
        f"{profile.source}"
    )


def wanted(config: DictConfig) -> str:
    """The kind of device that measures here: the user's choice for cluster=local."""
    kind: str = config.cluster.device if config.cluster.name == "local" else "auto"
    return kind
