"""The periodic engine: a pattern is repeated on each micro-batch, a period after the one before, without a flush.

    period    |   0   |   1   |   2   |   3   |   4
    device 0   0F0     0F1 0B0 0F2 0B1 0F3 0B2     0B3        each device keeps to the order of the pattern, and
    device 1     1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3              starts a task as soon as what it waits for is there

The weights change while micro-batches are under way: `engine.versions` says who sees which, by default two versions as
in PipeDream-2BW (`harness.core.staleness`). Between two updates nothing waits. A step is `batch.micro_batches`
micro-batches, so the pipeline drains at the end of each: a run comes near to the pattern's period with many
micro-batches in a step.

What it cannot do:

* It executes F and B only: no recomputation, no backward pass in halves.
* Stages share no parameters: two versions of a weight would have to be summed in two places.
* A stage's optimizer steps between two of its tasks, on the device's own time, which the pattern does not count.
* After an error some stages may have been updated and others not.
* On CUDA devices a queue waits for its stream after each task, so that launching kernels does not overlap them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import ClassVar

from engines.periodic import weight_versions
from harness.core import divisors, staleness
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel, updating
from harness.core.model_profile import ModelProfile
from harness.core.op import Kind, Op
from harness.core.pattern import Pattern
from harness.core.plan import Mesh, Plan
from harness.core.problem import CannotRun, Fix, Problem, refuse
from harness.core.staleness import Corrections, of_group
from harness.interfaces import Capabilities, Engine, Model, PlanRequest, Session, SessionSpec
from harness.schedule import Schedule
from harness.schedule.dependency_graph import MESSAGES
from harness.schedule.frozen_stages import leave_out
from harness.schedule.tied_weight_ops import always_tied, tied_stages
from harness.schedule.transfers import Transfer


@dataclass
class Config:
    """`harness.core.staleness` says which weights a micro-batch sees, and how delays are corrected."""

    PLANNERS: ClassVar[tuple[str, ...]] = ("madpipe", "contiguous", "pipedream")

    name: str = "periodic"
    """The engine."""
    versions: str = "2bw"
    """With which weights a micro-batch computes. flush: one update a step, when the pipeline is empty; 2bw: those of
    one update before, of which two versions are kept (PipeDream-2BW); stash: the newest when it enters a stage, forward
    and backward the same, a version for each micro-batch in flight (PipeDream); none: the newest (PipeMare)."""
    update_every: int | None = None
    """Micro-batches between two updates of the weights; null: the fewest that engine.versions allows, 1 for stash and
    none. With as many as batch.micro_batches there is one update a step, as in engine=single."""
    corrections: Corrections = field(default_factory=Corrections)


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    found = staleness.check(config.versions, "2bw", config.corrections)
    if config.update_every is None or config.update_every >= 1:
        return found
    fix = {"engine.update_every": None}
    return [*found, Problem("engine.update_every", config.update_every, "must be at least 1, or null", (fix,))]


def build(config: Config) -> PeriodicEngine:
    return PeriodicEngine(config)


PLANNERS: tuple[Fix, ...] = tuple({"planner": name} for name in ("madpipe", "contiguous", "pipedream"))
"""The planners of periodic pipelines."""


class PeriodicEngine(Engine):
    capabilities = Capabilities(changed_weights=False)  # versions of them are copies

    def __init__(self, config: Config) -> None:
        self.config = config

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """Updates that do not share the micro-batches of a step equally."""
        every, m = self.config.update_every, request.batch.micro_batches
        if every not in (None, m) and self.config.versions == "flush":
            message = f"is not batch.micro_batches {m}: engine.versions=flush makes one update a step"
            return [Problem("engine.update_every", every, message, ({"engine.update_every": None},))]
        if every is None or m % every == 0:
            return []
        fixes = tuple({"engine.update_every": number} for number in divisors.nearest_divisors(m, every))
        return [Problem("engine.update_every", every, f"does not divide batch.micro_batches {m}", fixes)]

    def refuses_layers(self, request: PlanRequest, profile: ModelProfile) -> list[Problem]:
        """Parameters that stages share wherever these are cut."""
        stages, layers = request.pipeline, len(profile.layers)
        names = always_tied(profile, stages) if stages <= layers else set()
        cut = Plan.contiguous([1] * (stages - 1) + [layers - stages + 1]) if names else None
        return _tied(cut, profile, names) if cut else []

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        if plan.pattern is None:
            return [_without_pattern()]
        tied = _tied(plan, profile, tied_stages(plan, profile))
        found = [*_recomputed(plan), *tied, *staleness.cast(self.config.versions, profile)]
        broken = _broken(plan, plan.pattern)
        return [*found, *broken] if broken else [*found, *self._too_few(plan, plan.pattern)]

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Warn that weights are updated within a step, with gradients one update old, so that losses differ from other
        engines'."""
        every, m = self.update_every(plan), plan.micro_batches
        if every == m or plan.pattern is None:
            return []
        order = weight_versions.schedule(plan, plan.pattern, m, every)
        versions = self.config.versions
        stages = [weight_versions.stage_delays(own, versions, every) for own in weight_versions.tasks_of(order)]
        old = staleness.described(list(map(of_group, stages)))
        each = f"{every} of its {m} micro-batches each"
        message = f"makes {m // every} updates a step, of {each}, with gradients {old}; other engines make one"
        return [Problem("engine.update_every", every, message, ({"engine.update_every": m},))]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        """Raises CannotRun for a plan without a pattern. What crosses a cut, skips included, is one message."""
        if plan.pattern is None:
            raise CannotRun([_without_pattern()])
        transfers = tuple(
            Transfer(number, number + 1, "", profile.crossing_bytes(stage.first))
            for number, stage in enumerate(plan.stages[1:])
        )
        every = self.update_every(plan)
        found = weight_versions.schedule(plan, plan.pattern, plan.micro_batches, every, transfers)
        return _without_frozen(found, plan, profile)

    def update_every(self, plan: Plan) -> int:
        """Micro-batches for each update; raises CannotRun for a plan without a pattern."""
        if self.config.update_every is not None:
            return self.config.update_every
        if plan.pattern is None:
            raise CannotRun([_without_pattern()])
        m = plan.micro_batches
        if self.config.versions != "2bw":
            return m if self.config.versions == "flush" else 1
        return weight_versions.allowed(weight_versions.schedule(plan, plan.pattern, m, m), m)[0]

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """Copies of the weights, as many as the first stage has with a micro-batch in flight for each stage. An update
        uses up its gradients; corrections need the weights before it."""
        config = self.config
        versions = staleness.copies(config.versions, mesh.pipeline, config.update_every or 1, config.corrections)
        return replace(
            model,
            versions=versions,
            optimizer=model.optimizer + config.corrections.kept,
            freed=True,
            updating=(1.0 if config.corrections.kept else 0.0, updating(model)),
        )

    def copies(self, plan: Plan) -> tuple[int, ...]:
        """Each stage's versions, which its micro-batches in flight need, and the newest if corrections move them."""
        if plan.pattern is None:
            return ()
        every, corrections = self.update_every(plan), self.config.corrections
        order = weight_versions.schedule(plan, plan.pattern, plan.micro_batches, every)
        plans = weight_versions.copy_plans(order, plan.pattern, self.config.versions, every, corrections)
        return tuple(one.count + corrections.apart for one in plans)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.periodic.session import PeriodicSession

        if plan.pattern is None:
            raise CannotRun([_without_pattern()])
        refuse(self._too_few(plan, plan.pattern))
        return PeriodicSession(model, plan, plan.pattern, spec, self.config, self.update_every(plan))

    def _too_few(self, plan: Plan, pattern: Pattern) -> list[Problem]:
        """Updates so often that two versions of the weights do not suffice."""
        every, m = self.config.update_every, plan.micro_batches
        if every is None or m % every or self.config.versions != "2bw":
            return []
        order = weight_versions.schedule(plan, pattern, m, m)
        if weight_versions.allows(order, m, every):
            return []
        counts = weight_versions.stored(order)
        most = max(counts)
        message = f"lets stage {counts.index(most)} store {every + 1} micro-batches with 2 versions, it stores {most}"
        fix = {"engine.update_every": next(number for number in weight_versions.allowed(order, m) if number > every)}
        return [Problem("engine.update_every", every, message, (fix,))]


def _without_frozen(schedule: Schedule, plan: Plan, profile: ModelProfile) -> Schedule:
    """The schedule without gradients of a frozen prefix, alone or next to others in a message."""
    if not profile.frozen_prefix:
        return schedule
    frozen = [skip for skip in profile.skips if not profile.needed_gradient(skip)]

    def sized(op: Op) -> Op:
        if op.kind != "copy" or op.peer is None or op.forward:
            return op
        first = plan.stages[op.peer].first
        return replace(op, bytes=op.bytes - sum(one.bytes for one in frozen if one.source < first <= one.target))

    queues = tuple(replace(queue, ops=tuple(map(sized, queue.ops))) for queue in schedule.queues)
    return leave_out(replace(schedule, queues=queues), plan, profile.frozen_prefix, {})


def _without_pattern() -> Problem:
    return Problem("planner", None, "gives no pattern, engine=periodic repeats one", PLANNERS)


def _recomputed(plan: Plan) -> list[Problem]:
    if plan.recompute == "never":
        return []
    message = f"asks to recompute {plan.recompute}, engine=periodic does not recompute"
    return [Problem("planner", None, message, ({"engine": "gpipe"},))]


def _broken(plan: Plan, pattern: Pattern) -> list[Problem]:
    """A pattern that is not F and B of each stage, once each and on its device."""
    tasks = Counter((p.op.stage, p.op.kind, p.device) for p in pattern.ops if p.op.kind not in MESSAGES)
    wanted: Counter[tuple[int, Kind, int]] = Counter()
    for number, stage in enumerate(plan.stages):
        wanted.update([(number, "F", stage.device), (number, "B", stage.device)])
    wrong = [*(tasks - wanted), *(wanted - tasks)]
    return [
        Problem(
            "planner",
            None,
            f"gives a pattern with {tasks[task]} x {Op(*task[:2])} on device {task[2]}, its plan needs {wanted[task]}",
            PLANNERS,
            numbers={"device": task[2], "found": tasks[task], "needed": wanted[task]},
        )
        for task in wrong[:1]
    ]


def _tied(plan: Plan, profile: ModelProfile, names: Collection[str]) -> list[Problem]:
    """Those of some parameters that stages share, whatever devices the stages are on."""
    tied = {name: stages for name, stages in tied_stages(plan, profile).items() if len(stages) > 1 and name in names}
    fixes: tuple[Fix, ...] = ({"engine": "gpipe"}, {"mesh.pipeline": 1})
    return [
        Problem(
            "mesh.pipeline",
            plan.mesh.pipeline,
            f"puts {name} into stages {' and '.join(map(str, stages))}, engine=periodic takes it in 1",
            fixes,
            staleness.UNTIED,
        )
        for name, stages in tied.items()
    ]
