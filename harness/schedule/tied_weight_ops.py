"""Tied weights on several devices: an all-reduce of their gradients before the optimizer steps.

device 0   0B2  0B1  0B0  |0collective:all_reduce@tied/embedding.weight|  0step
device 3   3B2  3B1  3B0  |3collective:all_reduce@tied/embedding.weight|  3step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.core.model_profile import ModelProfile
from harness.core.op import Op, Queue
from harness.core.plan import Plan
from harness.schedule import QueueOps, Schedule
from harness.schedule.dependency_graph import TIED


@dataclass(frozen=True)
class Tie:
    """A parameter that each of `stages` keeps a copy of: the first stage that needs it on each device.

    The `communicator` "tied" reduces over the copies of one replica, "copies" over those of all replicas at once.
    """

    name: str
    stages: tuple[int, ...]
    bytes: int
    communicator: str = TIED

    @property
    def part(self) -> str:
        """The `part` of its collective op."""
        return f"all_reduce@{self.communicator}/{self.name}"


def plan_ties(plan: Plan, profile: ModelProfile, communicator: str = TIED) -> list[Tie]:
    """Lists the trained parameters that layers on different devices share, in the order of the layers.

    Stages on one device share a copy."""
    sizes = {tied.name: tied.bytes for layer in profile.layers for tied in layer.tied if not tied.frozen}
    ties = []
    for name, stages in tied_stages(plan, profile).items():
        home: dict[int, int] = {}  # the first stage on each device
        for number in stages:
            home.setdefault(plan.stages[number].device, number)
        if len(home) > 1 and name in sizes:
            ties.append(Tie(name, tuple(home.values()), sizes[name], communicator))
    return ties


def tied_stages(plan: Plan, profile: ModelProfile) -> dict[str, list[int]]:
    """Maps each parameter that layers share to its stages, on whatever devices, in the order of the layers."""
    stages_of: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        layers = profile.layers[stage.first : stage.last + 1]
        for name in dict.fromkeys(tied.name for layer in layers for tied in layer.tied):
            stages_of.setdefault(name, []).append(number)
    return stages_of


def always_tied(profile: ModelProfile, stages: int) -> set[str]:
    """Returns the parameters that several of so many stages share wherever these are cut: one stage with all of their
    layers, and those in between, leaves too few layers for the others."""
    layers_of: dict[str, list[int]] = {}
    for number, layer in enumerate(profile.layers):
        for tied in layer.tied:
            layers_of.setdefault(tied.name, []).append(number)
    return {name for name, held in layers_of.items() if len(profile.layers) - (held[-1] - held[0]) < stages}


def with_ties(schedule: Schedule, ties: Sequence[Tie], queue: Queue) -> Schedule:
    """Adds an all-reduce of each tie's gradient to that queue of all its devices.

    In the compute queue it comes before the optimizer, in any other one at the end.
    """
    queues = {(queue.device, queue.name): queue for queue in schedule.queues}
    for tie in ties:
        for stage in tie.stages:
            place = (schedule.devices[stage], queue)
            op = Op(stage, "collective", None, tie.part, bytes=tie.bytes, queue=queue)
            queues[place] = _with(queues.get(place, QueueOps(*place, ())), op)
    ordered = sorted(queues.items(), key=lambda item: (item[0][0], item[0][1] != "compute", item[0][1]))
    return replace(schedule, queues=tuple(queue for _, queue in ordered)) if ties else schedule


def _with(queue: QueueOps, op: Op) -> QueueOps:
    end = next((place for place, other in enumerate(queue.ops) if other.kind == "step"), len(queue.ops))
    return replace(queue, ops=(*queue.ops[:end], op, *queue.ops[end:]))
