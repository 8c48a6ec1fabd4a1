"""The best consecutive stages under a memory limit, with the schedule 1F1B* (MadPipe, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.profile import ModelProfile
from planners.periodic import plans
from planners.periodic.chain import Chain
from planners.periodic.contiguous import best, least_memory
from planners.periodic.groups import timing


@dataclass
class Config:
    """The keys of `planner=contiguous`."""

    name: str = "contiguous"
    """The planner."""
    duplex: str = "half"
    """cluster: as its links; half: a link is busy one way at a time, as in the paper; full: both ways at once."""


class Contiguous:
    """One stage for each device, fewer where that is as fast. No partition has a shorter period in memory."""

    def __init__(self, config: Config) -> None:
        self.duplex = config.duplex

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` is that of `plans.to_plan`.

        Raises NoPlan for more devices than layers, for a profile without times, and where no partition fits: it says
        the smallest memory that works.
        """
        chain = plans.requested(profile, cluster, memory, request, self.duplex)

        def made(some: Chain) -> Plan:
            found = best(some, request.pipeline)
            if found is None:
                raise plans.none_fits(some, least_memory(some, request.pipeline), cluster, request)
            period, of_devices = found
            return plans.to_plan(timing(some, of_devices, period), request, {})

        return plans.fitting(chain, made, profile, cluster, memory)


def build(config: Config) -> Contiguous:
    """The planner; raises ValueError as `check` does."""
    check(config)
    return Contiguous(config)


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    if wrong := plans.wrong_duplex(config.duplex):
        raise ValueError("\n".join(wrong))
