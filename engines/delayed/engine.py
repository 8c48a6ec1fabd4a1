"""The delayed engine: trains on one device with the delays that an asynchronous pipeline of P stages has.

    micro-batch         0    1    2    3    4    5             engine.stages=3 engine.versions=stash
    stage 0 computes    W0   W0   W0   W1   W2   W3            2 updates late: 3 micro-batches in flight
    stage 1 computes    W0   W0   W1   W2   W3   W4            1
    stage 2 computes    W0   W1   W2   W3   W4   W5            0

One micro-batch after the other runs through all stages, each with the weights that it would find in the pipeline
(`harness.core.staleness`): so a pipeline of 32 stages can be studied on a laptop. Stage j has P - j micro-batches in
flight, as in PipeDream's 1F1B, or as many as `engine.in_flight` says. The losses are those of engine=periodic with the
same stages, micro-batches in flight and `engine.drain=true`.

Its predicted time and memory are those of this one device, not of the pipeline that it stands for: simulate that with
engine=periodic on the cluster in question.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import ClassVar

from harness.core import divisors, staleness
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Mesh, Plan
from harness.core.problem import Fix, Problem
from harness.core.staleness import Corrections
from harness.core.value_checks import at_least
from harness.interfaces import Capabilities, Engine, Model, PlanRequest, Session, SessionSpec
from harness.schedule import Schedule, collect_queues
from harness.schedule.tied_weight_ops import tied_stages


@dataclass
class Config:
    scheme: ClassVar[bool] = False  # engine=all leaves it out

    name: str = "delayed"
    """The engine."""
    stages: int = 4
    """Stages of the pipeline whose delays the run has; all are on one device."""
    in_flight: list[int] | None = None
    """Micro-batches in flight in each stage, itself included; null: engine.stages in the first one, 1 in the last."""
    way_back: list[int] | None = None
    """Backward tasks that each stage begins from its own of a micro-batch to that of stage 0, for
    engine.corrections.round_trip; null: half of what it has fewer in flight than stage 0, as where forward
    and backward tasks take equally long."""
    versions: str = "stash"
    """With which weights a micro-batch computes: flush, 2bw, stash or none, as in engine=periodic. 2bw is a delay of
    one update whatever is in flight; a pipeline needs in_flight - 1 micro-batches for an update to have no more."""
    update_every: int | None = None
    """Micro-batches between two updates of the weights; null: 1 for stash and none, batch.micro_batches for flush, and
    for 2bw the fewest that two versions of the weights allow."""
    drain: bool = False
    """Whether the pipeline drains at the end of each step, as that of engine=periodic does, so that the first
    micro-batches of a step have no delay. false: it never does, and a step of one update has the delays, too."""
    corrections: Corrections = field(default_factory=Corrections)

    def flights(self) -> list[int]:
        """Micro-batches in flight in each stage."""
        return list(self.in_flight) if self.in_flight else list(range(self.stages, 0, -1))

    def ways_back(self) -> list[int]:
        """Backward tasks that each stage begins until a micro-batch has gone from it to stage 0."""
        return list(self.way_back) if self.way_back else staleness.ways_back(self.flights())


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    found = [
        *staleness.check(config.versions, "stash", config.corrections),
        *at_least("engine.stages", config.stages, 1),
    ]
    found += at_least("engine.update_every", config.update_every, 1)
    for name, counts, least in (("in_flight", config.in_flight, 1), ("way_back", config.way_back, 0)):
        if counts is not None and (len(counts) != config.stages or min(counts, default=0) < least):
            message = f"must be a number of at least {least} for each of engine.stages {config.stages}"
            found.append(Problem(f"engine.{name}", counts, message, ({f"engine.{name}": None},)))
    return found


def build(config: Config) -> DelayedEngine:
    return DelayedEngine(config)


class DelayedEngine(Engine):
    capabilities = Capabilities(pipeline=False, changed_weights=False)

    def __init__(self, config: Config) -> None:
        self.config = config

    def placement(self, pipeline: int) -> tuple[int, ...]:
        return (0,) * self.config.stages

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """Updates that do not share the micro-batches of a step equally, and more stages than layers."""
        found = []
        every, m = self.config.update_every, request.batch.micro_batches
        if every is not None and m % every:
            fixes: tuple[Fix, ...] = tuple({"engine.update_every": n} for n in divisors.nearest_divisors(m, every))
            found.append(Problem("engine.update_every", every, f"does not divide batch.micro_batches {m}", fixes))
        if request.layers is not None and self.config.stages > request.layers:
            message = f"needs a layer for each stage, the model has {request.layers}"
            found.append(Problem("engine.stages", self.config.stages, message, ({"engine.stages": request.layers},)))
        return found

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Other stages than those of the pipeline; weights that stages share: their versions would have to be one."""
        if len(plan.stages) != self.config.stages or len(plan.devices) != 1:
            message = f"makes {len(plan.stages)} stages, engine.stages is {self.config.stages}"
            return [Problem("planner", None, message, ({"planner": "balance"},))]
        tied = {name: stages for name, stages in tied_stages(plan, profile).items() if len(stages) > 1}
        return [
            Problem(
                "engine.stages",
                len(plan.stages),
                f"puts {name} into stages {' and '.join(map(str, stages))}, engine=delayed takes it in 1",
                ({"engine.stages": 1},),
                staleness.UNTIED,
            )
            for name, stages in tied.items()
        ] + staleness.cast(self.config.versions, profile)

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Say how late gradients are, stage by stage: so losses differ from other engines'."""
        late, every, m = self._late(plan), self.update_every(plan), plan.micro_batches
        if not any(late):
            return []
        message = f"has gradients {staleness.described(late)}; those of other engines are not late"
        if m > every:
            message += f", and they make one update a step, not {m // every}, of {every} micro-batches each"
        most = max(self.config.flights())
        if self.config.versions == "2bw" and every + 1 < most:
            message += f". A pipeline with {most} micro-batches in flight needs more of them for an update"
        return [Problem("engine.versions", self.config.versions, message, ({"engine.versions": "flush"},))]

    def _late(self, plan: Plan) -> list[int]:
        """The delay of each stage in updates, once the pipeline is full."""
        flights, every = self.config.flights(), self.update_every(plan)
        if self.config.drain and every == plan.micro_batches:
            return [0] * len(flights)
        return [staleness.late(self.config.versions, count, every) for count in flights]

    def update_every(self, plan: Plan) -> int:
        """Micro-batches for each update."""
        m, most = plan.micro_batches, max(self.config.flights())
        least = {"flush": m, "2bw": most - 1}.get(self.config.versions, 1)
        if self.config.update_every is not None:
            return self.config.update_every
        two_groups = self.config.drain and self.config.versions == "2bw"  # both begin with the first weights of a step
        return next((n for n in divisors.list_divisors(m) if n >= least or (two_groups and 2 * n >= m)), m)

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        """0F0 1F0 2F0 2B0 1B0 0B0, the next micro-batch, and after each group 0step1 1step1 2step1."""
        ops, stages = [], range(len(plan.stages))
        for i in range(plan.micro_batches):
            ops += [Op(j, "F", i) for j in stages] + [Op(j, "B", i) for j in reversed(stages)]
            if (i + 1) % self.update_every(plan) == 0:
                ops += [Op(j, "step", i) for j in stages]
        return Schedule(collect_queues(((0, "compute"), op) for op in ops), devices=(0,) * len(plan.stages))

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """The weights that compute, and the newest ones; `copies` knows how many older ones there are."""
        return replace(model, versions=2, optimizer=model.optimizer + self.config.corrections.kept)

    def copies(self, plan: Plan) -> tuple[int, ...]:
        """The weights that compute, the newest ones, and older ones, with their updates to predict from."""
        each = 1 + self.config.corrections.prediction
        return tuple(2 + late * each for late in self._late(plan))

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.delayed.session import DelayedSession

        return DelayedSession(model, plan, spec, self.config, self.update_every(plan))
