"""The planner `madpipe`: stages under a memory limit, several on a device where that helps, and a valid pattern."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.problem import NoPlan
from harness.profile import ModelProfile
from planners.madpipe.config import Config
from planners.madpipe.search import SMALL, Found, least_period, search
from planners.periodic import plans
from planners.periodic.chain import Chain

EXACT = "planner.allocation=exact"


class MadPipe:
    """MadPipe (Beaumont, Eyraud-Dubois, Shilova), in both phases exact unless `planner.allocation=published`."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` is that of `plans.to_plan`, and in seconds: `first_phase_s`, `contiguous_s` (the best consecutive
        stages; None where nothing fits, or none were looked for), `least_s` (no whole stages with one device that has
        several are faster), `least_of_any_s` (nothing is), and `finished`.

        Raises NoPlan for more devices than layers, for a profile without times, and where nothing fits.
        """
        chain = plans.requested(profile, cluster, memory, request, self.config.duplex)
        if not self.config.atomic and chain.layers > SMALL:
            what = f"is for at most {SMALL} layers, the model has {chain.layers}"
            raise NoPlan("planner.atomic false", what, "planner.atomic=true")
        return plans.fitting(chain, lambda some: self._made(some, cluster, request), profile, cluster, memory)

    def _made(self, chain: Chain, cluster: Cluster, request: PlanRequest) -> Plan:
        found = search(chain, request.pipeline, self.config)
        if isinstance(found, int):
            raise self._none(chain, found, cluster, request)
        if not plans.alike(cluster):  # what the slowest link allows is no bound where others are faster
            found = replace(found, least=None)
        return plans.to_plan(found.timing, request, _told(chain, found, request.pipeline))

    def _none(self, chain: Chain, needed: int, cluster: Cluster, request: PlanRequest) -> NoPlan:
        published = self.config.allocation == "published"
        if published and needed <= chain.memory:
            return NoPlan("planner.allocation published", "found no plan, though there is one", EXACT)
        refused = plans.none_fits(chain, needed, cluster, request, plans.FOUND).problem
        return NoPlan(refused.key, refused.what, f"{refused.mend} {EXACT}" if published else refused.mend)


def _told(chain: Chain, found: Found, devices: int) -> dict[str, object]:
    def seconds(ticks: Fraction | None) -> float | None:
        return None if ticks is None else chain.seconds(float(ticks))

    return {
        "first_phase_s": seconds(found.first_phase),
        "contiguous_s": seconds(found.contiguous),
        "least_s": seconds(found.least),
        "least_of_any_s": seconds(least_period(chain, devices)),
        "finished": found.finished,
    }
