"""The mesh and the batch of a run: values that the user gives, and values that follow from them."""

from __future__ import annotations

from omegaconf import DictConfig

from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh
from harness.interfaces import Capabilities

DEGREES = ("tensor", "pipeline", "data")
"""Dimensions of the mesh, in the order in which an open one gets the remaining devices."""


def fill(config: DictConfig, can: Capabilities, devices: int) -> None:
    """Set mesh.data where it follows from the number of devices, because the batch is split over the replicas."""
    if config.mesh.data is None and can.data:
        config.mesh.data = resolve(config, can, devices, layers=devices).data


def resolve(config: DictConfig, can: Capabilities, devices: int, layers: int) -> Mesh:
    """Fill in the mesh dimensions that the user left open.

    Dimensions that the engine does not support are 1. The first open one of (tensor, pipeline, data) gets all remaining
    devices; any further open one is 1. The result is clamped to the cluster, and the pipeline to the number of layers,
    so that later checks can still run; `request` and `profile_match` report what was clamped. Stages of planner=given
    are kept, and `plan_fits.check_plan` reports them.
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
    if not given_balance(config):
        known["data"] = max(1, min(known["data"], devices // known["tensor"]))
        known["pipeline"] = max(1, min(known["pipeline"], layers, devices // (known["data"] * known["tensor"])))
    return Mesh(**known)


def given_balance(config: DictConfig) -> list[int]:
    """Return the number of layers of each stage if the user gives them (planner=given), else an empty list."""
    return list(config.planner.get("balance") or [])


def micro_batch(config: DictConfig) -> int:
    """Return the samples of one micro-batch, rounded down if there is a remainder, at least 1."""
    return max(1, config.batch.size // ((given_degree(config, "data") or 1) * config.batch.micro_batches))


def batch_size(config: DictConfig, profile: ModelProfile) -> int:
    """Return the global batch size that gives the profile's micro-batch."""
    size: int = profile.micro_batch * config.batch.micro_batches * (given_degree(config, "data") or 1)
    return size


def has(config: DictConfig, can: Capabilities, degree: str) -> bool:
    """Whether the engine has replicas, stages or shards on this cluster."""
    here = config.cluster.name == "local"
    return getattr(can, degree) and not (here and degree in can.simulated_only)


def given_degree(config: DictConfig, degree: str) -> int | None:
    value: int | None = config.mesh[degree]
    return value
