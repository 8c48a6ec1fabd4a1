"""The sbp engine: tensor parallelism with the plan's strategy for each matmul, over real collectives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

from harness.checks.engine_support import unsplit
from harness.core import divisors
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Fix, Problem
from harness.interfaces import Capabilities, Engine, Model, Session, SessionSpec
from harness.sbp.matmul_chain import Chain, chain_from_profile
from harness.sbp.route_to_plan import grid_from_plan
from harness.schedule import Schedule
from harness.schedule.builders.deepspeed import deepspeed
from harness.schedule.builders.single import single
from harness.schedule.builders.tensor_parallel import with_traffic
from harness.schedule.frozen_stages import without_frozen
from harness.schedule.tied_weight_ops import plan_ties
from harness.schedule.transfers import plan_transfers


@dataclass
class Config:
    PLANNERS: ClassVar[tuple[str, ...]] = ("autoddl", "megatron", "data_parallel")

    name: str = "sbp"
    """The engine."""
    overlap: bool = True
    """All-reduce gradients while the backward pass continues."""
    local_statistics: bool = False
    """Batch norm normalizes with the statistics of a device's own samples, as replicas do, which sends nothing; else
    with those of all samples of a micro-batch, as `engine=single` does."""
    aligned: bool = False
    """Synchronize the devices before each collective, so that its measured time contains no waiting."""


def build(config: Config) -> SBPEngine:
    return SBPEngine(config)


HERE = "local"
"""The cluster that things run on."""


class SBPEngine(Engine):
    capabilities = Capabilities(
        optimizers=("sgd", "adam", "adamw"),
        tensor=True,
        multi_process=True,
        channels_last=False,
        sharded_checkpoints=True,
    )

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """A plan without traffic is none for tensor parallelism; some blocks cannot be brought together."""
        if (found := unsplit(plan, "sbp")) or not plan.layouts or cluster.name != HERE:
            return found  # or a cost model's, which harness.checks.request refuses to run; or a plan for elsewhere
        wrong = _wrong(plan, profile)[:1]
        return [Problem("mesh.tensor", plan.mesh.tensor, message, _fixes(plan, profile, cluster)) for message in wrong]

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Warn of random numbers that are others than those of a whole micro-batch."""
        apart = [layer.name for layer in profile.layers if layer.traits.whole_draws]
        if not apart or plan.mesh.tensor == 1:
            return []
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        message = (
            f"draws random numbers in layer {apart[0]!r}{more} in another way than by an nn.Dropout on a tensor with "
            "samples first (as attention with dropout does): each device draws its own, so losses differ from those of "
            "engine=single, as those of another seed do"
        )
        return [Problem("model", profile.model, message, hint="dropout 0 there, or nn.Dropout modules")]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        """Return the schedule: for several stages DeepSpeed's pipeline, 1F1B with blocking messages."""
        if len(plan.stages) == 1:
            return with_traffic(single(plan.micro_batches), plan)
        transfers = plan_transfers(plan, profile, portals=False)
        devices = [stage.device for stage in plan.stages]
        found = deepspeed(plan.micro_batches, devices, transfers, ties=plan_ties(plan, profile))
        return without_frozen(with_traffic(found, plan), plan, profile)

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        """Return the layers as they run: local statistics cost no more than a batch norm of one device."""
        if not self.config.local_statistics:
            return profile
        layers = (replace(layer, norms=0, norm_bytes=0) for layer in profile.layers)
        return replace(profile, layers=tuple(layers))

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.sbp.session import SBPSession

        return SBPSession(model, plan, spec, self.config, self.schedule)


def _wrong(plan: Plan, profile: ModelProfile) -> list[str]:
    """Blocks that do not divide, or cannot be brought together."""
    from engines.sbp.block_layout import Mesh
    from engines.sbp.instruction import Unrunnable, undivided
    from engines.sbp.program import program

    mesh = Mesh(grid_from_plan(plan))
    try:
        return undivided(program(plan, chain_from_profile(profile), mesh), mesh)
    except Unrunnable as error:
        return [str(error)]


def _fixes(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Fix, ...]:
    """A batch of which all devices have as many samples, data parallel if that is not enough; or fewer devices."""
    samples, devices = profile.micro_batch, plan.mesh.tensor
    wanted = -(-samples // devices) * devices
    enough = wanted > samples and not _wrong(plan, profile.for_samples(wanted))
    more: Fix = {} if enough else {"planner": "data_parallel"}
    more |= {"batch.size": wanted * plan.micro_batches * plan.mesh.data} if wanted > samples else {}
    return more, {"mesh.tensor": _fewer(devices, chain_from_profile(profile), cluster)}


def _fewer(devices: int, chain: Chain, cluster: Cluster) -> int:
    """The most by which every block divides: all sizes do, or there is one digit, by which a plan divides once. All
    stages have as many of them on a node."""
    sizes = {size for item in chain.matmuls for size in (item.samples, item.inputs, item.divided)}
    below = [n for n in divisors.list_divisors(devices)[:-1] if cluster.places_equally(n)]
    return max(n for n in below if len(divisors.list_divisors(n)) == 2 or not any(size % n for size in sizes))
