"""PipeDream's partition, balanced under its own estimate of memory, with the schedule 1F1B* (MadPipe, section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan, Stage
from harness.problem import NoPlan
from harness.profile import ModelProfile
from planners.periodic import pipedream, plans
from planners.periodic.chain import Chain
from planners.periodic.contiguous import least_memory
from planners.periodic.groups import smallest_period, timing
from planners.periodic.pipedream import Estimate, partition


@dataclass
class Config:
    """The keys of `planner=pipedream`."""

    name: str = "pipedream"
    """The planner."""
    estimate: str = "optimizer"
    """What it takes a stage to hold: optimizer ((activations + state) x (devices - 1 - position), as PipeDream's public
    optimizer), position (a micro-batch for each stage from it on), devices (one for each device), none (nothing)."""
    duplex: str = "half"
    """cluster: as its links; half: a link is busy one way at a time, as in the paper; full: both ways at once."""


class PipeDream:
    """The baseline of MadPipe: first the partition, then the shortest period with which that one fits."""

    def __init__(self, config: Config) -> None:
        self.estimate, self.duplex = cast(Estimate, config.estimate), config.duplex

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` is that of `plans.to_plan`, with `first_phase_s`, what the partitioner hopes for.

        Raises NoPlan for more devices than layers, for a profile without times, where no partition fits the estimate,
        and where the partition fits with no period.
        """
        chain = plans.requested(profile, cluster, memory, request, self.duplex)
        return plans.fitting(chain, lambda some: self._made(some, cluster, request), profile, cluster, memory)

    def _made(self, chain: Chain, cluster: Cluster, request: PlanRequest) -> Plan:
        found = partition(chain, request.pipeline, self.estimate)
        period = smallest_period(chain, found[1]) if found else None
        if found is None or period is None:
            needed = least_memory(chain, request.pipeline)
            if needed > chain.memory:  # then no partition fits, whatever is estimated
                raise plans.none_fits(chain, needed, cluster, request)
            what = self._wrong(chain, found[1], request) if found else self._strict(chain, request)
            raise NoPlan(f"planner.estimate {self.estimate}", what, "planner=contiguous")
        predicted = {"first_phase_s": chain.seconds(found[0])}
        return plans.to_plan(timing(chain, found[1], period), request, predicted)

    def _strict(self, chain: Chain, request: PlanRequest) -> str:
        needed = pipedream.least_memory(chain, request.pipeline, self.estimate)
        return f"allows no partition on devices with {_gb(chain.memory)}, it wants {_gb(needed)}"

    def _wrong(self, chain: Chain, chosen: Sequence[Stage], request: PlanRequest) -> str:
        guesses = pipedream.estimated(chain, chosen, request.pipeline, self.estimate)
        needs = [chain.held(stage.first, stage.last, 1) for stage in chosen]
        number = needs.index(max(needs))
        return (
            f"was wrong: stage {number} needs {_gb(needs[number])} or more and was taken for {_gb(guesses[number])}, "
            f"a device has {_gb(chain.memory)}"
        )


def _gb(size: int) -> str:
    return f"{size / plans.GB:.6g} GB"


def build(config: Config) -> PipeDream:
    """The planner; raises ValueError as `check` does."""
    check(config)
    return PipeDream(config)


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    wrong, known = plans.wrong_duplex(config.duplex), get_args(Estimate)
    if config.estimate not in known:
        what = f"is none of {', '.join(known)}"
        wrong.append(f"planner.estimate {config.estimate}   {what}   -> planner.estimate={known[0]}")
    if wrong:
        raise ValueError("\n".join(wrong))
