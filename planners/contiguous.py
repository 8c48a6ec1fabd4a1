"""The planner `contiguous`: the best consecutive stages under a memory limit, with 1F1B* (MadPipe, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem, refuse
from harness.core.value_checks import one_of
from harness.interfaces import PlanRequest
from planners.periodic import timing_to_plan
from planners.periodic.contiguous_partition import best, least_memory
from planners.periodic.layer_ticks import Chain
from planners.periodic.one_f_one_b_star import timing


@dataclass
class Config:
    """The keys of `planner=contiguous`."""

    name: str = "contiguous"
    """The planner."""
    duplex: str = "half"
    """cluster: as cluster.duplex says; half: a link carries one direction at a time, as in the paper; full: both at
    once."""


class Contiguous:
    """One stage for each device, fewer where that is as fast. No partition that fits has a shorter period."""

    def __init__(self, config: Config) -> None:
        self.duplex = config.duplex

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` is that of `timing_to_plan.to_plan`.

        Raises NoPlan for more devices than layers, for a profile without times, and where no partition fits; it names
        the smallest memory that works.
        """
        chain = timing_to_plan.requested_chain(profile, cluster, memory, request, self.duplex, "contiguous")

        def make(limited: Chain) -> Plan:
            partition = best(limited, request.pipeline)
            if partition is None:
                raise timing_to_plan.memory_error(limited, least_memory(limited, request.pipeline), cluster, request)
            period, stages = partition
            return timing_to_plan.to_plan(timing(limited, stages, period), request, {})

        return timing_to_plan.plan_that_fits(chain, make, profile, cluster, memory)


def build(config: Config) -> Contiguous:
    """Returns the planner; raises `CannotRun` with what `check` finds."""
    refuse(check(config), "planner=contiguous")
    return Contiguous(config)


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    return one_of("planner.duplex", config.duplex, timing_to_plan.DUPLEXES)
