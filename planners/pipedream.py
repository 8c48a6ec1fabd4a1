"""The planner `pipedream`: PipeDream's partition under its memory estimate, with 1F1B* (MadPipe, section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan, Stage
from harness.core.problem import NoPlan, Problem, refuse
from harness.core.value_checks import one_of
from harness.interfaces import PlanRequest
from planners.periodic import pipedream_partition, timing_to_plan
from planners.periodic.contiguous_partition import least_memory
from planners.periodic.layer_ticks import Chain
from planners.periodic.one_f_one_b_star import smallest_period, timing
from planners.periodic.pipedream_partition import Estimate, partition


@dataclass
class Config:
    """The keys of `planner=pipedream`."""

    name: str = "pipedream"
    """The planner."""
    estimate: str = "optimizer"
    """Estimate of a stage's memory. optimizer: (activations + state) x (devices - 1 - position), as in PipeDream's
    public optimizer; position: one micro-batch for each stage from this one to the last; devices: one for each device;
    none: no estimate."""
    duplex: str = "half"
    """cluster: as cluster.duplex says; half: a link carries one direction at a time, as in the paper; full: both at
    once."""


class PipeDream:
    """The baseline of MadPipe: first the partition, then the shortest period with which it fits."""

    def __init__(self, config: Config) -> None:
        self.estimate, self.duplex = cast(Estimate, config.estimate), config.duplex

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` is that of `timing_to_plan.to_plan`, with `first_phase_s`, the partitioner's
        estimate.

        Raises NoPlan for more devices than layers, for a profile without times, where no partition fits the estimate,
        and where the partition fits with no period.
        """
        chain = timing_to_plan.requested_chain(profile, cluster, memory, request, self.duplex, "pipedream")
        return timing_to_plan.plan_that_fits(
            chain, lambda limited: self._make(limited, cluster, request), profile, cluster, memory
        )

    def _make(self, chain: Chain, cluster: Cluster, request: PlanRequest) -> Plan:
        partitioned = partition(chain, request.pipeline, self.estimate)
        period = smallest_period(chain, partitioned[1]) if partitioned else None
        if partitioned is None or period is None:
            needed = least_memory(chain, request.pipeline)
            if needed > chain.memory:  # then no partition fits, whatever the estimate
                raise timing_to_plan.memory_error(chain, needed, cluster, request)
            message = self._wrong(chain, partitioned[1], request) if partitioned else self._strict(chain, request)
            raise NoPlan(Problem("planner.estimate", self.estimate, message, ({"planner": "contiguous"},)))
        predicted = {"first_phase_s": chain.seconds(partitioned[0])}
        return timing_to_plan.to_plan(timing(chain, partitioned[1], period), request, predicted)

    def _strict(self, chain: Chain, request: PlanRequest) -> str:
        needed = pipedream_partition.least_memory(chain, request.pipeline, self.estimate)
        return f"allows no partition on devices with {_gb(chain.memory)}, it wants {_gb(needed)}"

    def _wrong(self, chain: Chain, chosen: Sequence[Stage], request: PlanRequest) -> str:
        estimates = pipedream_partition.estimated(chain, chosen, request.pipeline, self.estimate)
        needs = [chain.held(stage.first, stage.last, 1) for stage in chosen]
        number = needs.index(max(needs))
        return (
            f"counts {_gb(estimates[number])} of memory for stage {number}, too little: it needs {_gb(needs[number])} "
            f"with one micro-batch at a time, and a device has {_gb(chain.memory)}. PipeDream chooses the stages by "
            "this estimate, so they do not fit"
        )


def _gb(size: int) -> str:
    return f"{size / timing_to_plan.GB:.6g} GB"


def build(config: Config) -> PipeDream:
    """Returns the planner; raises `CannotRun` with what `check` finds."""
    refuse(check(config), "planner=pipedream")
    return PipeDream(config)


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    duplex = one_of("planner.duplex", config.duplex, timing_to_plan.DUPLEXES)
    return duplex + one_of("planner.estimate", config.estimate, get_args(Estimate))
