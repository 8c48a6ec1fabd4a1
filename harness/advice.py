"""What makes a run fit that needs more memory than there is: nothing is recommended that was not tried first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness import check, display, memory, planning, registry
from harness.cluster import Cluster
from harness.interfaces import Engine, Planner
from harness.mends import typed
from harness.problem import CannotRun
from harness.profile import ModelProfile

Changes = dict[str, Any]
"""Keys with the values that a user would type."""
FACTORS = (2, 4, 8, 16)


def mend(config: DictConfig, profile: ModelProfile, cluster: Cluster) -> str:
    """What to type so that the run fits, as little as possible; else what it lacks."""
    engine: Engine = registry.build("engine", config.engine)
    changes = _fastest(config, profile, cluster)
    for further in () if changes else _ladder(config, engine, profile, cluster):
        if _step_s(config, profile, cluster, further) is not None:
            changes = _fewest(config, profile, cluster, further)
            break
    return typed(changes) or _lack(config, profile, cluster)


def changed(config: DictConfig, changes: Changes) -> DictConfig:
    """A copy of the configuration with them."""
    other = copy.deepcopy(config)
    for key, value in changes.items():
        OmegaConf.update(other, key, value)
    return other


def _fastest(config: DictConfig, profile: ModelProfile, cluster: Cluster) -> Changes:
    """Of the changes of one key that cost no devices and leave the batch as it is: the one with the shortest step.

    Of a key that has numbers the first one that fits. Without any that fits: nothing.
    """
    found: dict[float, Changes] = {}
    for values in ([*_shards(config)], [*_micro_batches(config)], [recompute(config)], [_placed(config)]):
        for changes in filter(None, values):
            step_s = _step_s(config, profile, cluster, changes)
            if step_s is not None:
                found.setdefault(step_s, changes)
                break
    return found[min(found)] if found else {}


def _lack(config: DictConfig, profile: ModelProfile, cluster: Cluster) -> str:
    """Why nothing helps."""
    model = memory.named(config.memory, config.optimizer.name, config.optimizer.momentum)
    state = model.state_bytes(profile, 0, len(profile.layers) - 1)
    there = cluster.devices * cluster.device.memory_bytes
    if state > there:
        return f"a smaller model: its parameters need {display.size(state)}, all devices have {display.size(there)}"
    return "a smaller batch.size or model"


def _ladder(config: DictConfig, engine: Engine, profile: ModelProfile, cluster: Cluster) -> Iterator[Changes]:
    """What is tried where no change of one key is enough, the least first.

    Recompute and place by memory; offload; with both more shards, smaller micro-batches; more devices; a smaller batch.
    """
    both, offloading = recompute(config) | _placed(config), offload(config)
    tried = [both, offloading]
    both |= offloading
    tried += [both, *(both | more for more in (*_shards(config), *_micro_batches(config)))]
    for more in (*_devices(config, engine, profile, cluster), *_batches(config)):
        tried += [more, both | more]
    yield from (changes for number, changes in enumerate(tried) if changes and changes not in tried[:number])


def recompute(config: DictConfig) -> Changes:
    """All activations again in the backward pass, where the engine can and does not yet."""
    keys = {"checkpoint": "always", "checkpoint_every": "auto"}
    return {f"engine.{key}": value for key, value in keys.items() if _other(config.engine, key, value)}


def offload(config: DictConfig) -> Changes:
    """The optimizer's state in the host's memory, where the engine can and does not yet."""
    return {"engine.offload": True} if config.engine.get("offload") is False else {}


def _placed(config: DictConfig) -> Changes:
    return {"planner.by": "memory"} if _other(config.planner, "by", "memory") else {}


def _other(group: DictConfig, key: str, value: str) -> bool:
    """Whether the group has such a key, and another word there."""
    return isinstance(group.get(key), str) and group[key] != value


def _shards(config: DictConfig) -> Iterator[Changes]:
    """More of the model's state in shards over the replicas, where the engine has such a key."""
    zero = config.engine.get("zero")
    if zero is not None and config.mesh.data != 1:
        yield from ({"engine.zero": more} for more in range(zero + 1, 4))


def _micro_batches(config: DictConfig) -> Iterator[Changes]:
    """More micro-batches of fewer samples; those of a stored profile have the size that they have."""
    for factor in FACTORS:
        if not config.profile and check.micro_batch(config) % factor == 0:
            yield {"batch.micro_batches": config.batch.micro_batches * factor}


def _batches(config: DictConfig) -> Iterator[Changes]:
    """Smaller batches in as many micro-batches."""
    for factor in FACTORS:
        if not config.profile and check.micro_batch(config) % factor == 0:
            yield {"batch.size": config.batch.size // factor}


def _devices(config: DictConfig, engine: Engine, profile: ModelProfile, cluster: Cluster) -> Iterator[Changes]:
    """More stages, on more devices where all are taken; there are no more of them on this machine."""
    if not engine.capabilities.pipeline:
        return
    taken, layers = planning.mesh(config, engine, profile, cluster), len(profile.layers)
    for stages in [*(taken.pipeline * factor for factor in FACTORS if taken.pipeline * factor < layers), layers]:
        if stages <= taken.pipeline:
            return
        size = taken.size // taken.pipeline * stages
        more: Changes = {"mesh.pipeline": stages} if config.mesh.pipeline else {}
        if size > cluster.devices:
            if config.cluster.name == "local":
                return
            grown, fixed = ("nodes", cluster.devices_per_node) if cluster.nodes > 1 else ("devices", 1)
            more[f"cluster.{grown}"] = -(-size // fixed)
        yield more


def _fewest(config: DictConfig, profile: ModelProfile, cluster: Cluster, changes: Changes) -> Changes:
    """Changes that fit, without those that are not needed."""
    for key in list(changes):
        rest = {other: value for other, value in changes.items() if other != key}
        if rest and _step_s(config, profile, cluster, rest) is not None:
            changes = rest
    return changes


def _step_s(config: DictConfig, profile: ModelProfile, cluster: Cluster, changes: Changes) -> float | None:
    """Seconds of a step with these changes; None where there is no plan, or a device has not the memory for it."""
    wanted = changed(config, changes)
    profile = profile.of_samples(profile.micro_batch * check.micro_batch(wanted) // check.micro_batch(config))
    cluster = replace(cluster, nodes=changes.get("cluster.nodes", cluster.nodes),
                      devices_per_node=changes.get("cluster.devices", cluster.devices_per_node))  # fmt: skip
    try:
        engine: Engine = registry.build("engine", wanted.engine)
        planner: Planner = registry.build("planner", wanted.planner)
        if check.request(wanted, engine.capabilities, cluster):
            return None
        draft = planning.draft(wanted, engine, planner, profile, cluster)
    except CannotRun:
        return None
    figures = draft.plan.predicted
    if check.of_memory(draft.plan, figures["peak_memory_bytes"], cluster, draft.memory):
        return None
    return float(figures["step_time_s"])
