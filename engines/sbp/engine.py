"""The sbp engine: every matrix product split as the plan's strategy says, over real collectives."""

from __future__ import annotations

from contextlib import AbstractContextManager

from engines.sbp.config import Config
from engines.sbp.instruction import Unrunnable, undivided
from engines.sbp.layout import Mesh
from engines.sbp.program import program
from harness import divisors
from harness.cluster import Cluster
from harness.engine_check import unsplit
from harness.interfaces import Capabilities, Engine, Model, Session, SessionSpec
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.sbp.chain import Chain, chain_of
from harness.sbp.planned import grid_of_plan
from harness.schedule import Schedule
from harness.schedule.deepspeed import deepspeed
from harness.schedule.hops import plan_hops
from harness.schedule.single import single
from harness.schedule.tensor import with_traffic
from harness.schedule.ties import plan_ties

HERE = "local"
"""The cluster that things run on."""


class SBPEngine(Engine):
    capabilities = Capabilities(tensor=True, ranks=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """A plan without traffic is none for tensor parallelism; some blocks cannot be brought together."""
        if (found := unsplit(plan, "sbp")) or not plan.layouts or cluster.name != HERE:
            return found  # or a cost model's, which harness.check refuses to run; or a plan for elsewhere
        wrong = _wrong(plan, profile)
        return [Problem(f"mesh.tensor {plan.mesh.tensor}", what, _mends(plan, profile)) for what in wrong[:1]]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        """Of several stages the order of DeepSpeed's pipeline: 1F1B with messages that block."""
        if len(plan.stages) == 1:
            return with_traffic(single(plan.micro_batches), plan)
        hops = plan_hops(plan, profile, portals=False)
        devices = [stage.device for stage in plan.stages]
        return with_traffic(deepspeed(plan.micro_batches, devices, hops, ties=plan_ties(plan, profile)), plan)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.sbp.session import SBPSession

        return SBPSession(model, plan, spec, self.config, self.schedule)


def _wrong(plan: Plan, profile: ModelProfile) -> list[str]:
    """Blocks that do not divide, or cannot be brought together."""
    mesh = Mesh(grid_of_plan(plan))
    try:
        return undivided(program(plan, chain_of(profile), mesh), mesh)
    except Unrunnable as error:
        return [str(error)]


def _mends(plan: Plan, profile: ModelProfile) -> str:
    """A batch of which all devices have as many samples, data parallel if that is not enough; or fewer devices."""
    samples, devices = profile.micro_batch, plan.mesh.tensor
    wanted = -(-samples // devices) * devices
    enough = wanted > samples and not _wrong(plan, profile.of_samples(wanted))
    keys = [] if enough else ["planner=data_parallel"]
    keys += [f"batch.size={wanted * plan.micro_batches * plan.mesh.data}"] if wanted > samples else []
    return f"{' '.join(keys)}, or mesh.tensor={_fewer(devices, chain_of(profile))}"


def _fewer(devices: int, chain: Chain) -> int:
    """The most by which every block divides: all sizes do, or there is one digit, by which a plan divides once."""
    sizes = {size for item in chain.matmuls for size in (item.samples, item.inputs, item.outputs)}
    below = divisors.of(devices)[:-1]
    return max(n for n in below if len(divisors.of(n)) == 2 or not any(size % n for size in sizes))
