"""Find fixes for a run that needs more memory than a device has: every fix has been simulated."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from harness.checks import mesh, plan_fits, request
from harness.config import registry
from harness.core import divisors, memory_model, units
from harness.core.cluster import Cluster
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun, Fix, Problem
from harness.interfaces import Engine, Planner
from harness.planning import draft as planning_draft

FACTORS = (2, 4, 8, 16)
MOST_MICRO_BATCHES = 1024
"""To simulate more of them takes long."""


def advised(problem: Problem, config: DictConfig, profile: ModelProfile, cluster: Cluster) -> Problem:
    """A problem with the memory of devices, with the smallest fix after which the run fits; or why there is none."""
    fix = fitting(config, profile, cluster)
    return replace(problem, fixes=(fix,)) if fix else replace(problem, hint=_lack(config, profile, cluster))


def fitting(config: DictConfig, profile: ModelProfile, cluster: Cluster) -> Fix:
    """The smallest fix after which the run fits; an empty one where nothing helps."""
    engine: Engine = registry.build("engine", config.engine)
    if fix := _fastest(config, profile, cluster):
        return fix
    for fix in _ladder(config, engine, profile, cluster):
        if _step_s(config, profile, cluster, fix) is not None:
            return _fewest(config, profile, cluster, fix)
    return {}


def fixed(config: DictConfig, fix: Fix) -> DictConfig:
    """A copy of the configuration with the fix."""
    other = copy.deepcopy(config)
    for key, value in fix.items():
        OmegaConf.update(other, key, value)
    return other


def _fastest(config: DictConfig, profile: ModelProfile, cluster: Cluster) -> Fix:
    """The fix with the shortest step among those of one key that cost no devices and leave the batch as it is.

    For a key with several numbers the first one that fits is taken. Empty if nothing fits.
    """
    found: dict[float, Fix] = {}
    for fixes in ([*_shards(config)], [*_micro_batches(config)], [recompute(config)], [_placed(config)]):
        for fix in filter(None, fixes):
            step_s = _step_s(config, profile, cluster, fix)
            if step_s is not None:
                found.setdefault(step_s, fix)
                break
    return found[min(found)] if found else {}


def _lack(config: DictConfig, profile: ModelProfile, cluster: Cluster) -> str:
    """Why nothing helps."""
    model = memory_model.named(config.memory, config.optimizer.name, config.optimizer.momentum)
    state = model.state_bytes(profile, 0, len(profile.layers) - 1)
    there = cluster.devices * cluster.device.memory_bytes
    if state > there:
        return f"a smaller model: its parameters need {units.size(state)}, all devices have {units.size(there)}"
    return "a smaller batch.size or model"


def _ladder(config: DictConfig, engine: Engine, profile: ModelProfile, cluster: Cluster) -> Iterator[Fix]:
    """Yield combinations of fixes to try where no single key is enough, the smallest first.

    Recompute and place by memory; offload; with both more shards, smaller micro-batches; more devices; a smaller batch.
    """
    both, offloading = recompute(config) | _placed(config), offload(config)
    tried = [both, offloading]
    both |= offloading
    tried += [both, *(both | more for more in (*_shards(config), *_micro_batches(config)))]
    for more in (*_devices(config, engine, profile, cluster), *_batches(config)):
        tried += [more, both | more]
    yield from (fix for number, fix in enumerate(tried) if fix and fix not in tried[:number])


def recompute(config: DictConfig) -> Fix:
    """Recompute all activations in the backward pass, where the engine can and does not yet."""
    keys = {"checkpoint": "always", "checkpoint_every": "auto"}
    return {f"engine.{key}": value for key, value in keys.items() if _other(config.engine, key, value)}


def offload(config: DictConfig) -> Fix:
    """Keep the optimizer's state in the host's memory, where the engine can and does not yet."""
    return {"engine.offload": True} if config.engine.get("offload") is False else {}


def _placed(config: DictConfig) -> Fix:
    return {"planner.by": "memory"} if _other(config.planner, "by", "memory") else {}


def _other(group: DictConfig, key: str, value: str) -> bool:
    """Whether the group has such a key, and another word there."""
    return isinstance(group.get(key), str) and group[key] != value


def _shards(config: DictConfig) -> Iterator[Fix]:
    """More of the model's state in shards over the replicas, where the engine has such a key."""
    zero = config.engine.get("zero")
    if zero is not None and config.mesh.data != 1:
        yield from ({"engine.zero": more} for more in range(zero + 1, 4))


def _micro_batches(config: DictConfig) -> Iterator[Fix]:
    """More micro-batches of fewer samples; those of a stored profile have the size that they have."""
    for factor in _factors(config):
        if config.batch.micro_batches * factor <= MOST_MICRO_BATCHES:
            yield {"batch.micro_batches": config.batch.micro_batches * factor}


def _batches(config: DictConfig) -> Iterator[Fix]:
    """Smaller batches, each of half the samples of the one before: in as many micro-batches, then in fewer of one
    sample."""
    samples = 1 if config.profile else mesh.micro_batch(config)
    each = config.batch.size // samples
    while (samples := samples // 2) > 0:
        yield {"batch.size": each * samples}
    count = config.batch.micro_batches
    replicas = each // count
    while not config.profile and (count := count // 2) > 0:
        yield {"batch.size": replicas * count, "batch.micro_batches": count}


def _factors(config: DictConfig) -> list[int]:
    """Divisors of a micro-batch's samples, each at least twice the one before, up to micro-batches of one sample."""
    if config.profile:
        return []
    samples, found = mesh.micro_batch(config), [1]
    for divisor in divisors.list_divisors(samples):
        if divisor >= 2 * found[-1] or divisor == samples > 1:
            found.append(divisor)
    return found[1:]


def _devices(config: DictConfig, engine: Engine, profile: ModelProfile, cluster: Cluster) -> Iterator[Fix]:
    """More stages, on more devices where all are taken; there are no more of them on this machine."""
    if not engine.capabilities.pipeline:
        return
    taken, layers = planning_draft.mesh(config, engine, profile, cluster), len(profile.layers)
    for stages in [*(taken.pipeline * factor for factor in FACTORS if taken.pipeline * factor < layers), layers]:
        if stages <= taken.pipeline:
            return
        size = taken.size // taken.pipeline * stages
        more: Fix = {"mesh.pipeline": stages} if config.mesh.pipeline else {}
        if size > cluster.devices:
            if config.cluster.name == "local":
                return
            grown, fixed = ("nodes", cluster.devices_per_node) if cluster.nodes > 1 else ("devices", 1)
            more[f"cluster.{grown}"] = -(-size // fixed)
        yield more


def _fewest(config: DictConfig, profile: ModelProfile, cluster: Cluster, fix: Fix) -> Fix:
    """The fix without the keys that are not needed."""
    for key in list(fix):
        rest = {other: value for other, value in fix.items() if other != key}
        if rest and _step_s(config, profile, cluster, rest) is not None:
            fix = rest
    return fix


def _step_s(config: DictConfig, profile: ModelProfile, cluster: Cluster, fix: Fix) -> float | None:
    """Seconds of a step after the fix; None where there is no plan, or a device has not the memory for it."""
    wanted = fixed(config, fix)
    profile = profile.for_samples(profile.micro_batch * mesh.micro_batch(wanted) // mesh.micro_batch(config))
    nodes, devices = fix.get("cluster.nodes", cluster.nodes), fix.get("cluster.devices", cluster.devices_per_node)
    cluster = replace(cluster, nodes=nodes, devices_per_node=devices)
    try:
        engine: Engine = registry.build("engine", wanted.engine)
        planner: Planner = registry.build("planner", wanted.planner)
        if request.request(wanted, engine.capabilities, cluster):
            return None
        draft = planning_draft.draft(wanted, engine, planner, profile, cluster)
    except CannotRun:
        return None
    figures = draft.plan.predicted
    if plan_fits.check_memory(draft.plan, figures["peak_memory_bytes"], cluster, draft.memory):
        return None
    return float(figures["step_time_s"])
