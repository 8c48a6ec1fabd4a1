"""Why nothing fits, and what helps: only what was tried is recommended."""

from __future__ import annotations

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


def problems(config: DictConfig, overrides: Sequence[str], lines: Sequence[Line], fits: Fits) -> list[Problem]:
    """Of candidates that are all out."""
    full = [line for line in lines if line.full and line.needs_bytes]
    if not full:
        return impossible(overrides, lines)
    planned = [line for line in full if line.closed_form_step_time_s is not None]
    least = min(planned or full, key=lambda line: line.needs_bytes or 0)
    needs, there = sizes(least.needs_bytes or 0, least.memory_limit_bytes or 0)
    one = least.candidate
    where = f"mesh.tensor={one.mesh.tensor} mesh.pipeline={one.mesh.pipeline} mesh.data={one.mesh.data}"
    what = f"at least {needs} of {there} are needed, by {where} with micro-batches of {one.micro_batch}"
    only = len(lines) == 1
    key, fits_not = ("the only candidate", "does not fit") if only else (f"none of {len(lines)} candidates", "fits")
    return [Problem(key, f"{fits_not}: {what}", mend(config, fits))]


def impossible(overrides: Sequence[str], lines: Sequence[Line]) -> list[Problem]:
    """What speaks against the candidate that is nearest to a possible one.

    That is one with problems of what the user gave, not of what the search chose. Among as many it is the one of the
    fewest shards, then samples in a micro-batch, then replicas: more of these ask more of model and batch.
    """

    def far(line: Line) -> tuple[int, ...]:
        one, keys = line.candidate, [problem.key.partition(" ")[0] for problem in line.problems]
        chosen = sum(not request.given(overrides, key) for key in keys)
        return chosen, len(keys), one.mesh.tensor, one.micro_batch, one.mesh.data

    first, *rest = min(lines, key=far).problems
    others = f"; none of the {len(lines)} candidates is possible" if len(lines) > 1 else ""
    return [replace(first, what=first.what + others), *rest]


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
