"""Why nothing fits, and what helps: only what was tried is recommended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from harness import clusters, request
from harness.advice import FACTORS, Changes, changed, offload, recompute
from harness.cluster import Cluster
from harness.display import sizes
from harness.mends import typed
from harness.problem import CannotRun, Problem
from harness.tune.line import Line

Fits = Callable[[DictConfig, Cluster], bool]
MEMORY = "cluster.memory_gb"
ROOM = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""So many times what the closed form asks for is tried."""
NONE = "a smaller model, or devices with more memory"


def problems(config: DictConfig, overrides: Sequence[str], lines: Sequence[Line], fits: Fits) -> list[Problem]:
    """Of candidates that are all out."""
    full = [line for line in lines if line.full and line.needs_bytes]
    if not full:
        return impossible(overrides, lines)
    planned = [line for line in full if line.closed_form_step_time_s is not None]
    least = min(planned or full, key=lambda line: line.needs_bytes or 0)
    needs_bytes, there_bytes = least.needs_bytes or 0, least.memory_limit_bytes or 0
    needs, there = sizes(needs_bytes, there_bytes)
    one, why = least.candidate, least.out
    if needs_bytes > there_bytes:  # of more than its state a planner may have said how much it is
        why = f"at least {needs} of {there} are needed"
    where = f"mesh.tensor={one.mesh.tensor} mesh.pipeline={one.mesh.pipeline} mesh.data={one.mesh.data}"
    what = f"{why}, by {where} with micro-batches of {one.micro_batch}"
    only = len(lines) == 1
    key, fits_not = ("the only candidate", "does not fit") if only else (f"none of {len(lines)} candidates", "fits")
    ways = [helps(config, fits)]
    if request.given(overrides, MEMORY):
        ways.append(_roomier(config, needs_bytes, there_bytes, fits))
    return [Problem(key, f"{fits_not}: {what}", ", or ".join(filter(None, ways)) or NONE)]


def impossible(overrides: Sequence[str], lines: Sequence[Line]) -> list[Problem]:
    """What speaks against the candidate that is nearest to a possible one.

    That is one with problems of what the user gave, not of a mesh that the search chose. Among as many it is that of
    the fewest shards, then samples in a micro-batch, then replicas: more of these ask more of model and batch.
    """

    def far(line: Line) -> tuple[int, ...]:
        one, keys = line.candidate, [problem.key.partition(" ")[0] for problem in line.problems]
        chosen = sum(key.startswith("mesh.") and not request.given(overrides, key) for key in keys)
        return chosen, len(keys), one.mesh.tensor, one.micro_batch, one.mesh.data

    nearest = min(lines, key=far)
    first, *rest = nearest.problems
    mend = nearest.no_plan.problem.mend if nearest.no_plan else first.mend
    others = f"; none of the {len(lines)} candidates is possible" if len(lines) > 1 else ""
    return [Problem(first.key, first.what + others, mend), *rest]


def helps(config: DictConfig, fits: Fits) -> str:
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
    return ""


def _roomier(config: DictConfig, needs_bytes: int, there_bytes: int, fits: Fits) -> str:
    """Memory of the devices that is enough, which the closed form alone does not tell."""
    cluster = clusters.build(clusters.of(config.cluster))
    reserve = cluster.device.memory_bytes - there_bytes
    for factor in ROOM:
        enough_gb = _rounded_up((needs_bytes * factor + reserve) / clusters.GB)
        device = replace(cluster.device, memory_bytes=round(enough_gb * clusters.GB))
        if _tried(config, {}, replace(cluster, device=device), fits):
            return typed({MEMORY: f"{enough_gb:g}"})
    return ""


def _rounded_up(number: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


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
