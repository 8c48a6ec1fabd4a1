"""Why no candidate fits, and what helps: every fix was tried in the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from harness.checks import plan_fits
from harness.checks.plan_fits import MEMORY
from harness.config import cluster_config
from harness.config.overrides import given
from harness.core.cluster import Cluster
from harness.core.problem import CannotRun, Fix, Problem
from harness.core.units import sizes
from harness.planning.memory_advice import FACTORS, fixed, offload, recompute
from harness.planning.tune.result import Line

Fits = Callable[[DictConfig, Cluster], bool]
ROOM = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""The largest multiple of the analytic estimate of memory that is tried as a limit."""
NONE = "a smaller model, or devices with more memory"


def problems(config: DictConfig, overrides: Sequence[str], lines: Sequence[Line], fits: Fits) -> list[Problem]:
    """Explain why no candidate is possible."""
    full = [line for line in lines if line.full and line.needs_bytes]
    if not full:
        return impossible(overrides, lines)
    planned = [line for line in full if line.closed_form_step_time_s is not None]
    least = min(planned or full, key=lambda line: line.needs_bytes or 0)
    needs_bytes, there_bytes = least.needs_bytes or 0, least.memory_limit_bytes or 0
    needs, there = sizes(needs_bytes, there_bytes)
    one, why = least.candidate, least.problems[0].message
    if needs_bytes > there_bytes:  # of more than its state a planner may have said how much it is
        why = f"a device has {there}, at least {needs} are needed"
    where = f"mesh.tensor={one.mesh.tensor} mesh.pipeline={one.mesh.pipeline} mesh.data={one.mesh.data}"
    fits_not = "the only candidate does not fit" if len(lines) == 1 else f"none of {len(lines)} candidates fits"
    message = f"{fits_not}: {why}, by {where} with micro-batches of {one.micro_batch}"
    fixes = [helps(config, fits)]
    if given(overrides, MEMORY):
        fixes.append(_roomier(config, needs_bytes, there_bytes, fits))
    fixes = [fix for fix in fixes if fix]
    found = plan_fits.too_little_memory(message, needs_bytes, there_bytes)
    return [replace(found, fixes=tuple(fixes), hint="" if fixes else NONE)]


def impossible(overrides: Sequence[str], lines: Sequence[Line]) -> list[Problem]:
    """The problems of the candidate that is closest to a possible one.

    That is the one with the fewest problems of mesh sizes that the search chose, then the fewest problems, then the
    smallest tensor size, micro-batch and data size: larger ones ask more of model and batch.
    """

    def distance(line: Line) -> tuple[int, ...]:
        one, keys = line.candidate, [problem.key for problem in line.problems]
        chosen = sum(key.startswith("mesh.") and not given(overrides, key) for key in keys)
        return chosen, len(keys), one.mesh.tensor, one.micro_batch, one.mesh.data

    closest = min(lines, key=distance)
    first, *rest = closest.problems
    if closest.no_plan:
        first = closest.no_plan.problem
    others = f"; none of the {len(lines)} candidates is possible" if len(lines) > 1 else ""
    return [replace(first, message=first.message + others), *rest]


def helps(config: DictConfig, fits: Fits) -> Fix:
    """A fix after which something fits: with less memory, else on more devices; an empty one where neither helps."""
    cluster = cluster_config.build(cluster_config.from_group(config.cluster))
    for fix in _savings(config):
        if _tried(config, fix, cluster, fits):
            return fix
    most = [{}, *_savings(config)][-1]
    for factor in FACTORS if config.cluster.name != "local" else ():
        more, grown = _grown(cluster, factor)
        for fix in ({}, most):
            if _tried(config, fix, grown, fits):
                return more | fix
    return {}


def _roomier(config: DictConfig, needs_bytes: int, there_bytes: int, fits: Fits) -> Fix:
    """Memory of the devices that is enough, which the analytic estimate alone cannot say."""
    cluster = cluster_config.build(cluster_config.from_group(config.cluster))
    reserve = cluster.device.memory_bytes - there_bytes
    for factor in ROOM:
        enough_gb = _rounded_up((needs_bytes * factor + reserve) / cluster_config.GB)
        device = replace(cluster.device, memory_bytes=round(enough_gb * cluster_config.GB))
        if _tried(config, {}, replace(cluster, device=device), fits):
            return {MEMORY: float(f"{enough_gb:g}")}
    return {}


def _rounded_up(number: float) -> float:
    """Round up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _savings(config: DictConfig) -> Iterator[Fix]:
    """Yield the settings that save memory and are not set yet: one by one, then both together."""
    offloading, recomputing = offload(config), recompute(config)
    yield from filter(None, (offloading, recomputing))
    if offloading and recomputing:
        yield offloading | recomputing


def _grown(cluster: Cluster, factor: int) -> tuple[Fix, Cluster]:
    """A fix with so many times the devices, and that cluster."""
    if cluster.nodes > 1:
        return {"cluster.nodes": cluster.nodes * factor}, replace(cluster, nodes=cluster.nodes * factor)
    each = cluster.devices_per_node * factor
    return {"cluster.devices": each}, replace(cluster, devices_per_node=each)


def _tried(config: DictConfig, fix: Fix, cluster: Cluster, fits: Fits) -> bool:
    try:
        return fits(fixed(config, fix), cluster)
    except CannotRun:
        return False
