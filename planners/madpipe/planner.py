"""The planner `madpipe`: stages under a memory limit, several on a device where that helps, and a periodic schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Fix, NoPlan, Problem, refuse
from harness.core.value_checks import above_0, at_least, one_of
from harness.interfaces import PlanRequest
from planners.periodic import timing_to_plan
from planners.periodic.layer_ticks import Chain
from planners.periodic.timing_to_plan import DUPLEXES

if TYPE_CHECKING:
    from planners.madpipe.period_search import SearchResult
    from planners.periodic.task_times import Timing

PHASES = ("exact", "published")
MOST_LAYERS = 80
"""Algorithm 1 takes a quarter of a minute for so many and 8 devices, and minutes for twice as many."""


@dataclass
class Config:
    name: str = "madpipe"
    """The planner."""
    allocation: str = "exact"
    """exact: fixed point without grids, and the best consecutive stages; published: only the paper's Algorithm 1, up to
    80 layers."""
    iterations: int = 10
    """Iterations of Algorithm 1 (K in the paper), for planner.allocation=published."""
    atomic: bool = False
    """Run the layers of a stage as one block, as the paper does. Else they may also run apart, in at most 12 blocks on
    a device and 40 in all, if that makes the period 1 % shorter, and a step shorter, and the engine can run it; not
    with planner.allocation=published."""
    reassign: bool = True
    """Let stages change devices after the integer program."""
    limit_s: float = 8.0
    """Time limit of all integer programs together in seconds; then the best plan so far is used. The paper has 60."""
    duplex: str = "half"
    """cluster: as cluster.duplex says; half: a link carries one direction at a time, as in the paper; full: both at
    once."""


def build(config: Config) -> MadPipe:
    """Returns the planner; raises `CannotRun` with the problems of `check`."""
    refuse(check(config), "planner=madpipe")
    return MadPipe(config)


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    problems = one_of("planner.duplex", config.duplex, DUPLEXES) + one_of(
        "planner.allocation", config.allocation, PHASES
    )
    problems += at_least("planner.iterations", config.iterations, 1, fix=10)
    return problems + above_0("planner.limit_s", config.limit_s, 8)


EXACT: Fix = {"planner.allocation": "exact"}


class MadPipe:
    """MadPipe (Beaumont, Eyraud-Dubois, Shilova), in both phases exact unless `planner.allocation=published`."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns the best plan that the engine can run. `predicted` is that of `timing_to_plan.to_plan`, and in
        seconds: `first_phase_s`, `whole_s` and `contiguous_s` (the best stages whose layers run as one block, and the
        best consecutive ones; None where nothing fits, or where they were not searched), `least_s` (the lower bound for
        whole stages with one special device), `least_of_any_s` (the lower bound for any schedule), and `finished`.

        Raises NoPlan for more devices than layers, for a profile without times, for more layers than the published
        search can take, and where nothing fits.
        """
        chain = timing_to_plan.requested_chain(profile, cluster, memory, request, self.config.duplex, "madpipe")
        if self.config.allocation == "published" and chain.layers > MOST_LAYERS:
            message = f"takes minutes for more than {MOST_LAYERS} layers, the model has {chain.layers}"
            raise NoPlan(Problem("planner.allocation", "published", message, (EXACT,)))
        return timing_to_plan.plan_that_fits(
            chain, lambda limited: self._make(limited, cluster, request), profile, cluster, memory
        )

    def _make(self, chain: Chain, cluster: Cluster, request: PlanRequest) -> Plan:
        from planners.madpipe.period_search import search

        result = search(chain, request.pipeline, self.config)
        if isinstance(result, int):
            raise self._none(chain, result, cluster, request)
        if not timing_to_plan.equal_links(cluster):  # a bound for the slowest link is none where others are faster
            result = replace(result, least=None)
        predicted = _predicted(chain, result, request.pipeline)
        plans = [timing_to_plan.to_plan(timing, request, predicted) for timing in _to_choose_from(result, request)]
        return next((plan for plan in plans if not request.refused(plan)), plans[-1])

    def _none(self, chain: Chain, needed: int, cluster: Cluster, request: PlanRequest) -> NoPlan:
        published = self.config.allocation == "published"
        if published and needed <= chain.memory:
            message = "found no plan, though there is one"
            return NoPlan(Problem("planner.allocation", "published", message, (EXACT,)))
        refused = timing_to_plan.memory_error(chain, needed, cluster, request, timing_to_plan.FOUND).problem
        return NoPlan(replace(refused, fixes=tuple(fix | (EXACT if published else {}) for fix in refused.fixes)))


def _to_choose_from(result: SearchResult, request: PlanRequest) -> list[Timing]:
    """Returns the timings, the best one first. Layers apart fill and drain for longer: they must be faster in a step,
    too."""
    whole = filter(None, (result.whole, result.contiguous))
    count = request.batch.micro_batches
    faster = result.timing.step(count) < result.whole.step(count)
    return list(dict.fromkeys((*([result.timing] if faster else []), *whole)))


def _predicted(chain: Chain, result: SearchResult, devices: int) -> dict[str, object]:
    from planners.madpipe.period_search import least_period

    def seconds(ticks: Fraction | None) -> float | None:
        return None if ticks is None else chain.seconds(float(ticks))

    return {
        "first_phase_s": seconds(result.first_phase),
        "whole_s": seconds(result.whole.period),
        "contiguous_s": seconds(result.contiguous.period if result.contiguous else None),
        "least_s": seconds(result.least),
        "least_of_any_s": seconds(least_period(chain, devices)),
        "finished": result.finished,
    }
