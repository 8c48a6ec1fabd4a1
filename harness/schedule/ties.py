"""Parameters that live on several devices: their gradients are summed before the optimizer steps.

device 0   0B2  0B1  0B0  |0collective:all_reduce@tied/embedding.weight|  0step
device 3   3B2  3B1  3B0  |3collective:all_reduce@tied/embedding.weight|  3step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.op import Op, Queue
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.schedule import LaneOps, Schedule
from harness.schedule.graph import TIED


@dataclass(frozen=True)
class Tie:
    """A parameter that each of `stages` keeps a copy of: the first stage that needs it on each device.

    With the `communicator` "tied" the copies of one replica are summed, with "copies" those of all replicas at once.
    """

    name: str
    stages: tuple[int, ...]
    bytes: int
    communicator: str = TIED

    @property
    def part(self) -> str:
        """The collective's, as an op names it."""
        return f"all_reduce@{self.communicator}/{self.name}"


def plan_ties(plan: Plan, profile: ModelProfile, communicator: str = TIED) -> list[Tie]:
    """What layers on different devices share, in the order of the layers; stages on one device share a copy."""
    sizes = {tied.name: tied.bytes for layer in profile.layers for tied in layer.tied}
    found = []
    for name, stages in stages_of_tied(plan, profile).items():
        home: dict[int, int] = {}  # the first stage on each device
        for number in stages:
            home.setdefault(plan.stages[number].device, number)
        if len(home) > 1:
            found.append(Tie(name, tuple(home.values()), sizes[name], communicator))
    return found


def stages_of_tied(plan: Plan, profile: ModelProfile) -> dict[str, list[int]]:
    """The stages with each parameter that layers share, whatever devices they are on, in the order of the layers."""
    found: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        layers = profile.layers[stage.first : stage.last + 1]
        for name in dict.fromkeys(tied.name for layer in layers for tied in layer.tied):
            found.setdefault(name, []).append(number)
    return found


def with_ties(schedule: Schedule, ties: Sequence[Tie], queue: Queue) -> Schedule:
    """The schedule with an all-reduce of each tie's gradient in that queue of all its devices.

    In the compute queue it comes before the optimizer, in any other one at the end.
    """
    lanes = {(lane.device, lane.queue): lane for lane in schedule.lanes}
    for tie in ties:
        for stage in tie.stages:
            place = (schedule.devices[stage], queue)
            op = Op(stage, "collective", None, tie.part, bytes=tie.bytes, queue=queue)
            lanes[place] = _with(lanes.get(place, LaneOps(*place, ())), op)
    ordered = sorted(lanes.items(), key=lambda item: (item[0][0], item[0][1] != "compute", item[0][1]))
    return replace(schedule, lanes=tuple(lane for _, lane in ordered)) if ties else schedule


def _with(lane: LaneOps, op: Op) -> LaneOps:
    end = next((place for place, other in enumerate(lane.ops) if other.kind == "step"), len(lane.ops))
    return replace(lane, ops=(*lane.ops[:end], op, *lane.ops[end:]))
