"""What keeps a run from starting: every problem at once, in the user's own keys, each with its mend."""

from __future__ import annotations

import math
from collections.abc import Sequence

from omegaconf import DictConfig

from harness import display
from harness.cluster import Cluster
from harness.interfaces import Capabilities
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile

DEGREES = ("pipeline", "tensor", "data")
"""The first of these that an engine can do takes the devices that the given degrees leave."""


def request(config: DictConfig, can: Capabilities, cluster: Cluster | None) -> list[Problem]:
    """What is wrong with the request itself, before anything is known of the model. `cluster` None: is wrong itself."""
    return [
        *_degrees(config, can),
        *(_devices(config, can, cluster) if cluster else []),
        *profiling(config),
        *_place(config),
        *_dtype(config, can),
    ]


def profiling(config: DictConfig) -> list[Problem]:
    """What is wrong with the request of a profile: its micro-batches, and where its times shall be from."""
    return [*_micro_batches(config), *_costs(config)]


def resolve(config: DictConfig, can: Capabilities, devices: int, layers: int) -> Mesh:
    """The mesh of the run: a degree that is not given follows from the rest.

    One of them takes all devices that the given ones leave: the pipeline (never more stages than layers), else tensor,
    else data. What the engine, the cluster or the model does not allow is cut down to what they do, so that the other
    checks can go on; `request` and `against_profile` name it.
    """
    degrees = {name: _given(config, name) if getattr(can, name) else 1 for name in DEGREES}
    taken, free = 1, None
    for name, degree in degrees.items():
        if degree is None and free is None:
            free = name
        taken *= degree or 1
    known = {name: degree or 1 for name, degree in degrees.items()}
    if free:
        known[free] = max(1, devices // taken)
    known["pipeline"] = max(1, min(known["pipeline"], layers, devices // (known["data"] * known["tensor"])))
    return Mesh(**known)


def micro_batch(config: DictConfig) -> int:
    """Samples of one micro-batch, rounded down where they do not divide, and at least 1."""
    return max(1, config.batch.size // ((_given(config, "data") or 1) * config.batch.micro_batches))


def batch_size(config: DictConfig, profile: ModelProfile) -> int:
    """The batch whose micro-batches are those of the profile."""
    size: int = profile.micro_batch * config.batch.micro_batches * (_given(config, "data") or 1)
    return size


def against_profile(config: DictConfig, can: Capabilities, profile: ModelProfile, model_given: bool) -> list[Problem]:
    """What is wrong with the request now that the model's profile is known.

    `model_given`: the user chose a model. Without that, a stored profile decides which model is planned for.
    """
    found = []
    layers = len(profile.layers)
    pipeline = config.mesh.pipeline
    if can.pipeline and pipeline and pipeline > layers:
        what = f"needs at least {pipeline} layers, the model has {layers}"
        found.append(Problem(f"mesh.pipeline {pipeline}", what, f"mesh.pipeline={layers}"))
    if profile.skips and not can.skips:
        what = f"has {len(profile.skips)} skips, engine={config.engine.name} takes none"
        found.append(Problem(f"model {profile.model or config.model.name}", what, "engine=gpipe"))
    return found + (stored(config, profile, model_given) if config.profile else [])


def told_once(problems: Sequence[Problem]) -> list[Problem]:
    """The same problems, each once; of those that mend one key by different numbers, the one with the smallest."""
    kept: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        name, _, number = problem.mend.partition("=")
        place = (problem.key, name if number.isdigit() else problem.what)
        former = kept.setdefault(place, problem)
        if number.isdigit() and int(number) < int(former.mend.partition("=")[2]):
            kept[place] = problem
    return list(kept.values())


def of_plan(config: DictConfig, plan: Plan, mesh: Mesh, layers: int, cluster: Cluster) -> list[Problem]:
    """What a planner has got wrong: every layer must be in a stage, every stage on a device that there is, and the
    mesh must be the one that was asked for."""
    key = f"planner {config.planner.name}"
    found = []
    if plan.stages[-1].last + 1 != layers:
        found.append(
            Problem(key, f"placed {plan.stages[-1].last + 1} layers, the model has {layers}", "planner=balance")
        )
    if plan.mesh != mesh:
        found.append(Problem(key, f"planned for {plan.mesh}, asked for {mesh}", "planner=balance"))
    if max(plan.devices) >= cluster.devices:
        what = f"placed a stage on device {max(plan.devices)}, the last one is {cluster.devices - 1}"
        found.append(Problem(key, what, "planner=balance"))
    return found


def of_memory(plan: Plan, peak_bytes: Sequence[int], cluster: Cluster, memory: MemoryModel) -> list[Problem]:
    """Each device whose predicted peak is more than it has; `peak_bytes` in the order of `plan.devices`."""
    found = []
    there = max(0, cluster.device.memory_bytes - memory.reserve_bytes)
    for device, needed in zip(plan.devices, peak_bytes, strict=True):
        if needed <= there:
            continue
        owned = [str(number) for number, stage in enumerate(plan.stages) if stage.device == device]
        key = f"stage {owned[0]}" if len(owned) == 1 else f"stages {', '.join(owned)}"
        found.append(Problem(key, f"needs {display.size(needed)} of {display.size(there)}"))
    return found


def _degrees(config: DictConfig, can: Capabilities) -> list[Problem]:
    """Degrees that the engine does not have."""
    what = {"data": "replicas", "pipeline": "pipeline stages", "tensor": "tensor shards"}
    return [
        Problem(f"mesh.{name} {degree}", f"engine={config.engine.name} has no {what[name]}", f"mesh.{name}=1")
        for name in ("data", "pipeline", "tensor")
        if (degree := _given(config, name) or 1) > 1 and not getattr(can, name)
    ]


def _devices(config: DictConfig, can: Capabilities, cluster: Cluster) -> list[Problem]:
    """More devices than the cluster has."""
    degrees = {name: degree for name in ("data", "pipeline", "tensor")
               if getattr(can, name) and (degree := _given(config, name) or 1) > 1}  # fmt: skip
    size = Mesh(**degrees).size
    if size <= cluster.devices:
        return []
    key = " x ".join(f"mesh.{name} {degree}" for name, degree in degrees.items())
    largest = max(degrees, key=lambda name: degrees[name])
    mend = f"mesh.{largest}={max(1, cluster.devices * degrees[largest] // size)}"
    return [Problem(key, f"needs {size} devices, the cluster has {cluster.devices}", mend)]


def _micro_batches(config: DictConfig) -> list[Problem]:
    """All micro-batches have the same number of samples."""
    size, data, count = config.batch.size, _given(config, "data") or 1, config.batch.micro_batches
    if min(size, data, count) < 1:
        return []  # out of range, which is told elsewhere
    if size % data:
        mend = f"batch.size={_above(size, data)}"
        return [Problem(f"batch.size {size}", f"cannot be shared equally by mesh.data {data}", mend)]
    if (size // data) % count == 0:
        return []
    whole = f"batch.size {size}" if data == 1 else f"batch.size {size} / mesh.data {data}"
    return [Problem(f"batch.micro_batches {count}", f"does not divide {whole}", _nearest(size // data, count))]


def _nearest(size: int, count: int) -> str:
    """The divisors of `size` on both sides of `count`, the nearer one first."""
    small = [number for number in range(1, math.isqrt(size) + 1) if size % number == 0]
    divisors = {*small, *(size // number for number in small)}
    below = sorted(number for number in divisors if number < count)[-1:]
    above = sorted(number for number in divisors if number > count)[:1]
    return " or ".join(str(number) for number in sorted(above + below, key=lambda number: abs(number - count)))


def _above(size: int, data: int) -> int:
    return -(-size // data) * data


def _place(config: DictConfig) -> list[Problem]:
    if config.mode == "run" and config.cluster.name != "local":
        what = "is only described, runs need cluster=local"
        return [Problem(f"cluster {config.cluster.name}", what, "mode=simulate, or cluster=local")]
    return []


def _costs(config: DictConfig) -> list[Problem]:
    """Scaled times are those of another device: of the profile's, or of this machine for a described cluster."""
    if config.costs == "scaled" and config.cluster.name == "local" and not config.profile:
        what = "needs a profile of another device, this machine is measured as it is"
        return [Problem("costs scaled", what, "profile=FILE, or costs=measured")]
    return []


def _dtype(config: DictConfig, can: Capabilities) -> list[Problem]:
    dtype = config.precision.dtype
    if dtype in can.dtypes:
        return []
    what = f"engine={config.engine.name} takes {', '.join(can.dtypes)}"
    return [Problem(f"precision.dtype {dtype}", what, f"precision.dtype={can.dtypes[0]}")]


def stored(config: DictConfig, profile: ModelProfile, model_given: bool) -> list[Problem]:
    """A profile from a file: is it one of what will run? Planned and simulated can be any."""
    key = f"profile {config.profile}"
    name = config.model.name
    of = profile.model or "a model without a name"
    if model_given and profile.model != name and not profile.model.startswith(f"{name}_"):
        return [Problem(key, f"is of {of}, the model is {name}", "leave model= out, or profile=")]
    found = []
    if profile.micro_batch != micro_batch(config):
        what = f"is for micro-batches of {profile.micro_batch} samples, this run has {micro_batch(config)}"
        found.append(Problem(key, what, f"batch.size={batch_size(config, profile)}"))
    if config.mode != "run":
        return found
    if not model_given:
        return [
            Problem(
                key, f"is of {of}: without model= it is for planning and simulating", "mode=simulate, or model=NAME"
            )
        ]
    if profile.dtype != config.precision.dtype:
        what = f"is for {profile.dtype}, this run has {config.precision.dtype}"
        found.append(Problem(key, what, f"precision.dtype={profile.dtype}"))
    return found


def _given(config: DictConfig, degree: str) -> int | None:
    value: int | None = config.mesh[degree]
    return value
