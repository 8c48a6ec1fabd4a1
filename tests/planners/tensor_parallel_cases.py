"""What the tests of planners of matmuls ask for."""

from __future__ import annotations

from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import NAMED, MemoryModel
from harness.core.model_profile import ModelProfile
from harness.interfaces import BatchShape, PlanRequest

ADAM: MemoryModel = NAMED["adam_fp32"]


def cluster(devices: int = 8, local: int = 1, memory_bytes: int = 10**12) -> Cluster:
    return Cluster(
        nodes=devices // local, devices_per_node=local, device=Device(memory_bytes=memory_bytes),
        intra=Link(1e-6, 1e-11), node_port=Link(1e-5, 1e-10),
    )  # fmt: skip


def request(profile: ModelProfile, devices: int = 8, micro_batches: int = 1, **more: int) -> PlanRequest:
    return PlanRequest(BatchShape(profile.micro_batch * micro_batches, micro_batches), 1, tensor=devices, **more)
