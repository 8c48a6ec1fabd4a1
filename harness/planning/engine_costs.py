"""What the engine of a run takes on this machine beyond kernels and messages: measured once, then cached.

Only where layer times are measured, too: on this machine's CPU devices. `harness.worker.measure_engine` says how.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from harness.config import registry
from harness.core.cluster import Cluster, EngineCosts
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun, Problem, note
from harness.core.run_files import ENGINE_COSTS, ERROR, FLIGHT_RECORDER, MACHINE
from harness.host import devices, engine_cache, machine, one_at_a_time, profile_cache, run_queue
from harness.host.machine import Machine
from harness.launch import supervisor
from harness.launch.supervisor import WorkerFailed
from harness.planning.draft import optimizer_kind
from harness.report.progress import Progress


def count(config: DictConfig, profile: ModelProfile) -> bool:
    """Whether they are part of a prediction: where devices are this machine's CPUs whose layer times were measured, and
    the user gives no cost of a task."""
    cluster = config.cluster
    if cluster.name != "local" or cluster.task_s or config.mode == "profile" or profile.times != "measured":
        return False
    return devices.detect(cluster.device).kind == "cpu"


def with_costs(
    config: DictConfig,
    cluster: Cluster,
    profile: ModelProfile,
    here: Machine,
    folder: Path,
    title: str,
    progress: Progress,
) -> Cluster:
    """Returns the cluster with what its engine takes `here`. Where that is not known, or not well, a note says so."""
    if profile.parameter_bytes() and not any(layer.weights for layer in profile.layers):
        message = (
            f"does not say how many weights layers have: engine={config.engine.name} is predicted without its own time"
        )
        progress.note(note(Problem("profile", config.profile, message, hint="mode=profile makes one that does")))
        return cluster
    costs = _known(config) or _made(config, here, folder, title, progress)
    if doubt := _doubt(costs):
        progress.note(note(doubt))
    return replace(cluster, engines=(costs,))


def _known(config: DictConfig) -> EngineCosts | None:
    """The costs in the cache; None where they have to be measured, or measured again."""
    place = _place(config)
    costs = profile_cache.read(EngineCosts, place) if profile_cache.exists(place, config.remeasure) else None
    return None if costs is None or (costs.slowed >= run_queue.BUSY and profile_cache.may_improve(place)) else costs


def _made(config: DictConfig, here: Machine, folder: Path, title: str, progress: Progress) -> EngineCosts:
    """New costs, for the cache, too; or those that another process measures at this moment."""
    place = _place(config)
    with one_at_a_time.alone(one_at_a_time.MEASURING, progress.phase):
        if known := _known(config):
            return known
        before = profile_cache.exists(place, config.remeasure)
        again = "again, as the machine was busy the last time" if before else "once"
        progress.phase("measuring", f"{again}: what engine={config.engine.name} takes beyond its layers")
        if before:
            profile_cache.mark_repeated(place)
        costs = _measured(config, here, folder, title)
        profile_cache.keep(place, costs, f"what engine={costs.engine} takes is not kept")
        return costs


def _place(config: DictConfig) -> Path:
    name = config.engine.name
    source = registry.source("engine", config.engine)
    return engine_cache.path(name, source, optimizer_kind(config), machine.path(devices.detect("cpu")).stem)


def _doubt(costs: EngineCosts) -> Problem | None:
    if costs.why:
        message = f"is predicted without what it takes beyond its layers, which was not measured: {costs.why}"
        return Problem("engine", costs.engine, message, hint="remeasure=true tries again")
    if costs.slowed < run_queue.BUSY:
        return None
    message = f"has costs that were measured on a busy machine, {costs.slowed:.2f} times as slow as a quiet one"
    return Problem("engine", costs.engine, message, hint="remeasure=true, while nothing else runs")


def _measured(config: DictConfig, here: Machine, folder: Path, title: str) -> EngineCosts:
    here.save(folder / MACHINE)
    try:
        supervisor.run_worker(folder, title, config.launch.timeout_s, "engine")
        return EngineCosts.load(folder / ENGINE_COSTS)
    except (WorkerFailed, CannotRun) as error:
        why = error.outcome.reason if isinstance(error, WorkerFailed) else " ".join(str(error).split())
        return EngineCosts(config.engine.name, optimizer_kind(config), why=why)
    finally:
        for name in (MACHINE, ENGINE_COSTS, ERROR):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / FLIGHT_RECORDER, ignore_errors=True)
