"""What no plan of a candidate can go below: seconds of a step, and bytes of the fullest device. By these candidates are
ruled out before they are planned.

seconds   all layers, forward and backward, for all micro-batches of a replica, shared by its devices
bytes     the state, and without recomputation what one micro-batch saves, shared by the devices of a replica; on one of
          them at least what the layer saves that saves most
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh
from harness.planning.tune import peak_memory


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-batch on one device: of the forward passes, and of both. Bytes of the layer that saves
    most."""

    forward_s: float
    both_s: float
    most_saved: int

    @classmethod
    def of(cls, profile: ModelProfile) -> Work:
        last = len(profile.layers) - 1
        forward = profile.sum("forward_s", 0, last)
        most = max(layer.saved_bytes for layer in profile.layers)
        return cls(forward, forward + profile.sum("backward_s", 0, last), most)

    def seconds(self, mesh: Mesh, micro_batches: int, recompute: str) -> float:
        """Seconds that a step takes at least; "always" recomputes the forward passes of all micro-batches,
        "except_last" those of all but one."""
        again = {"always": micro_batches, "except_last": micro_batches - 1}.get(recompute, 0)
        return (micro_batches * self.both_s + again * self.forward_s) / (mesh.pipeline * mesh.tensor)


def least_bytes(memory: MemoryModel, profile: ModelProfile, mesh: Mesh, keeps: bool) -> tuple[int, int]:
    """Bytes that the fullest device needs at least: of the state alone, and with activations.

    `keeps`: a micro-batch's forward passes keep what they save until its backward pass.
    """
    state = peak_memory.share(memory, profile, mesh)
    if memory.activations != "saved":
        return state, state
    saved = [layer.saved_bytes for layer in profile.layers]
    devices = mesh.pipeline * mesh.tensor
    with_saved = state + sum(saved) // devices if keeps else state
    return state, max(with_saved, max(saved) // mesh.tensor)
