"""The mesh and the batch of a run: what the user gives, and what follows from it."""

from __future__ import annotations

from omegaconf import DictConfig

from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh
from harness.interfaces import Capabilities

DEGREES = ("tensor", "pipeline", "data")
"""The first of these that an engine can do takes the devices that the given degrees leave."""


def fill(config: DictConfig, can: Capabilities, devices: int) -> None:
    """Write down the number of replicas where it follows from the devices: the batch is shared by them."""
    if config.mesh.data is None and can.data:
        config.mesh.data = resolve(config, can, devices, layers=devices).data


def resolve(config: DictConfig, can: Capabilities, devices: int, layers: int) -> Mesh:
    """The mesh of the run: a degree that is not given follows from the rest.

    One of them takes all devices that the given ones leave: tensor, else the pipeline (never more stages than layers),
    else data. What the engine, the cluster or the model does not allow is cut down to what they do, so that the other
    checks can continue; `request` and `against_profile` name it. Stages that the user gives one by one stay: `of_plan`.
    """
    degrees = {name: given_degree(config, name) if has(config, can, name) else 1 for name in DEGREES}
    degrees |= {name: degrees[name] or 1 for name in can.simulated_only}
    taken, free = 1, None
    for name, degree in degrees.items():
        if degree is None and free is None:
            free = name
        taken *= degree or 1
    known = {name: degree or 1 for name, degree in degrees.items()}
    if free:
        known[free] = max(1, devices // taken)
    known["tensor"] = min(known["tensor"], devices)
    if not stated(config):
        known["data"] = max(1, min(known["data"], devices // known["tensor"]))
        known["pipeline"] = max(1, min(known["pipeline"], layers, devices // (known["data"] * known["tensor"])))
    return Mesh(**known)


def stated(config: DictConfig) -> list[int]:
    """The layers of each stage where the user gives them himself (planner=given), else nothing."""
    return list(config.planner.get("balance") or [])


def micro_batch(config: DictConfig) -> int:
    """Samples of one micro-batch, rounded down where they do not divide, and at least 1."""
    return max(1, config.batch.size // ((given_degree(config, "data") or 1) * config.batch.micro_batches))


def batch_size(config: DictConfig, profile: ModelProfile) -> int:
    """The batch whose micro-batches are those of the profile."""
    size: int = profile.micro_batch * config.batch.micro_batches * (given_degree(config, "data") or 1)
    return size


def has(config: DictConfig, can: Capabilities, degree: str) -> bool:
    """Whether the engine has replicas, stages or shards on this cluster."""
    here = config.cluster.name == "local"
    return getattr(can, degree) and not (here and degree in can.simulated_only)


def given_degree(config: DictConfig, degree: str) -> int | None:
    value: int | None = config.mesh[degree]
    return value
