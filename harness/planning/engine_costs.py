"""What the engine of a run takes on this machine beyond kernels and messages: measured once, then cached.

Only where that counts: a run on this machine's CPU devices whose layers take time. `harness.worker.measure_engine` says
how it is measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from harness.config import registry
from harness.core.cluster import Cluster, EngineCosts
from harness.core.problem import Problem, note
from harness.core.run_files import ENGINE_COSTS, ERROR
from harness.host import devices, engine_cache, profile_cache
from harness.launch import supervisor
from harness.launch.supervisor import WorkerFailed
from harness.report.progress import Progress


def count(config: DictConfig) -> bool:
    """Whether they are part of a prediction: where devices are this machine's CPUs, and layers take time."""
    if config.cluster.name != "local" or config.costs == "none" or config.trace or config.mode == "profile":
        return False
    return devices.detect(config.cluster.device).kind == "cpu"


def with_costs(config: DictConfig, cluster: Cluster, folder: Path, title: str, progress: Progress) -> Cluster:
    """Returns the cluster with what its engine takes. Where that cannot be measured a note says so, and it is left
    out."""
    place = _place(config)
    costs = engine_cache.load(place) if profile_cache.exists(place, config.remeasure) else None
    if costs is None:
        progress.phase("measuring", f"once: what engine={config.engine.name} takes beyond its layers")
        costs = _measured(config, folder, title, progress)
    return replace(cluster, engines=(costs,)) if costs else cluster


def are_there(config: DictConfig) -> bool:
    """Whether no worker is needed."""
    return profile_cache.exists(_place(config), config.remeasure)


def _place(config: DictConfig) -> Path:
    source = registry.source("engine", config.engine)
    return engine_cache.path(config.engine.name, source, config.optimizer.name)


def _measured(config: DictConfig, folder: Path, title: str, progress: Progress) -> EngineCosts | None:
    try:
        supervisor.run_worker(folder, title, config.launch.timeout_s, "engine")
    except WorkerFailed as error:
        (folder / ERROR).unlink(missing_ok=True)
        message = (
            f"is predicted without what it takes beyond its layers, which was not measured: {error.outcome.reason}"
        )
        progress.note(note(Problem("engine", config.engine.name, message)))
        return None
    costs = EngineCosts.load(folder / ENGINE_COSTS)
    (folder / ENGINE_COSTS).unlink()
    engine_cache.store(_place(config), costs)
    return costs
