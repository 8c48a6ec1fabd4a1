"""Why nothing fits, and what helps: only what was tried is recommended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from harness import clusters
from harness.advice import FACTORS, Changes, changed, offload, recompute
from harness.cluster import Cluster
from harness.display import sizes
from harness.mends import typed
from harness.problem import CannotRun, Problem
from harness.tune.line import Line

Fits = Callable[[DictConfig, Cluster], bool]


def problems(config: DictConfig, lines: Sequence[Line], fits: Fits) -> list[Problem]:
    """Of candidates that are all out."""
    full = [line for line in lines if line.full and line.needs_bytes]
    if not full:
        return indivisible(lines)
    planned = [line for line in full if line.closed_form_step_time_s is not None]
    least = min(planned or full, key=lambda line: line.needs_bytes or 0)
    needs, there = sizes(least.needs_bytes or 0, least.memory_limit_bytes or 0)
    one = least.candidate
    where = f"mesh.tensor={one.mesh.tensor} mesh.pipeline={one.mesh.pipeline} mesh.data={one.mesh.data}"
    fit = "does not fit" if len(lines) == 1 else "fits"
    what = f"{fit}: at least {needs} of {there} are needed, by {where} with micro-batches of {one.micro_batch}"
    return [Problem(_all(lines), what, mend(config, fits))]


def indivisible(lines: Sequence[Line]) -> list[Problem]:
    """Each reason once."""
    possible = "is not possible" if len(lines) == 1 else "is possible"
    return [Problem(_all(lines), f"{possible}: {why}") for why in dict.fromkeys(line.out for line in lines)]


def _all(lines: Sequence[Line]) -> str:
    return "the only candidate" if len(lines) == 1 else f"none of {len(lines)} candidates"


def mend(config: DictConfig, fits: Fits) -> str:
    """What to type so that something fits: less memory, else more devices; "" where nothing of that helps."""
    cluster = clusters.build(clusters.of(config.cluster))
    for changes in _savings(config):
        if _tried(config, changes, cluster, fits):
            return typed(changes)
    most = [{}, *_savings(config)][-1]
    for factor in FACTORS if config.cluster.name != "local" else ():
        key, grown = _grown(cluster, factor)
        for changes in ({}, most):
            if _tried(config, changes, grown, fits):
                return typed(key | changes)
    return "a smaller model, or devices with more memory"


def _savings(config: DictConfig) -> Iterator[Changes]:
    """What is not yet done to save memory: one by one, then both together."""
    offloading, recomputing = offload(config), recompute(config)
    yield from filter(None, (offloading, recomputing))
    if offloading and recomputing:
        yield offloading | recomputing


def _grown(cluster: Cluster, factor: int) -> tuple[Changes, Cluster]:
    """So many times the devices, and how to type it."""
    if cluster.nodes > 1:
        return {"cluster.nodes": cluster.nodes * factor}, replace(cluster, nodes=cluster.nodes * factor)
    each = cluster.devices_per_node * factor
    return {"cluster.devices": each}, replace(cluster, devices_per_node=each)


def _tried(config: DictConfig, changes: Changes, cluster: Cluster, fits: Fits) -> bool:
    try:
        return fits(changed(config, changes), cluster)
    except (CannotRun, ValueError):
        return False
