"""What no plan of a candidate can go below: seconds of a step, and bytes of the fullest device. By these candidates are
ruled out before they are planned. What no schedule of a plan can go below: by that plans wait for their estimate.

seconds   all layers, forward and backward, for all micro-batches of a replica, shared by its devices
bytes     the state, and without recomputation what one micro-batch saves, shared by the devices of a replica; on one of
          them at least what the layer saves that saves most
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh
from harness.planning.draft import Layout
from harness.planning.tune import peak_memory
from harness.simulator.op_durations import TaskCosts


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-batch on one device: of the forward passes that are recomputed, and of both. Bytes of the
    layer that saves most."""

    again_s: float
    both_s: float
    most_saved: int

    @classmethod
    def of(cls, profile: ModelProfile) -> Work:
        last = len(profile.layers) - 1
        forward = profile.sum("forward_s", 0, last)
        most = max(layer.saved_bytes for layer in profile.layers)
        return cls(
            profile.sum("forward_s", profile.frozen_prefix, last), forward + profile.sum("backward_s", 0, last), most
        )

    def seconds(self, mesh: Mesh, micro_batches: int, recompute: str) -> float:
        """Seconds that a step takes at least, with recomputation as in `recomputed`."""
        again = recomputed(micro_batches, recompute)
        return (micro_batches * self.both_s + again * self.again_s) / (mesh.pipeline * mesh.tensor)


def recomputed(micro_batches: int, recompute: str) -> int:
    """How many micro-batches are recomputed: "always" all, "except_last" all but one."""
    return {"always": micro_batches, "except_last": micro_batches - 1}.get(recompute, 0)


def of_plan(layout: Layout, halves: bool) -> float:
    """Seconds that no schedule of a plan can go below: all tasks of the busiest device, what its shards send each other
    in them, and the first micro-batch's way to it and the last one's way back, where each device has one stage.

    stage 0   F0 F1 F2 ..                  ..  B7
    stage 1   |  F0 F1 ..   busiest  .. F7 B7 |        m tasks forward and back, and those of the stages before

    `halves`: the gradients of the weights are tasks of their own, which can wait until the last micro-batch is on its
    way back.
    """
    plan = layout.plan
    seconds = TaskCosts(plan, layout.profile, layout.cluster, layout.memory).seconds
    forward, back = seconds["F"], seconds["B"]
    inputs = seconds["I"] if halves else back
    sent = [sum(one.seconds for one in traffic if one.phase != "weights") for traffic in plan.traffic]
    m = plan.micro_batches
    # stages of several devices recompute in their backward tasks; an order says which of its stages do
    again = 0 if sent or plan.order else recomputed(m, plan.recompute)
    busy, there, way_back, longest = dict.fromkeys(plan.devices, 0.0), 0.0, 0.0, 0.0
    alone = len(plan.stages) == len(plan.devices)
    for number, stage in enumerate(plan.stages):
        within = sent[number] if sent else 0.0
        repeated = again if stage.last >= layout.profile.frozen_prefix else 0
        busy[stage.device] += m * (forward[number] + back[number] + within) + repeated * forward[number]
        later = m * (back[number] - inputs[number])
        longest = max(longest, there + busy[stage.device] + max(0.0, way_back - later))
        if alone:
            there, way_back = there + forward[number], way_back + inputs[number]
    return longest


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
