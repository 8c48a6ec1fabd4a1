"""The periodic engine: a pattern is repeated on each micro-batch, a period after the one before, without a flush.

    period    |   0   |   1   |   2   |   3   |   4
    device 0   0F0     0F1 0B0 0F2 0B1 0F3 0B2     0B3        each device keeps to the order of the pattern, and
    device 1     1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3              starts a task as soon as what it waits for is there

The weights change while micro-batches are under way: `engines.periodic.versions` tells who sees which. Between two
updates nothing waits. A step is `batch.micro_batches` micro-batches, so the pipeline drains at the end of each: a run
comes near to the pattern's period with many micro-batches in a step.

What it cannot do:

* It executes F and B only: no recomputation, no backward pass in halves.
* Stages share no parameters: two versions of a weight would have to be summed in two places.
* A stage's optimizer steps between two of its tasks, on the device's own time, which the pattern does not count.
* After an error some stages may have been updated and others not.
* On CUDA devices a lane waits for its stream after each task, so that launching kernels does not overlap them.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace

from engines.periodic import versions
from engines.periodic.config import Config
from harness import divisors
from harness.cluster import Cluster
from harness.interfaces import Capabilities, Engine, Model, PlanRequest, Session, SessionSpec
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.op import Kind, Op
from harness.pattern import Pattern
from harness.plan import Plan
from harness.problem import CannotRun, Problem
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.graph import MESSAGES
from harness.schedule.hops import Hop
from harness.schedule.ties import stages_of_tied

PLANNERS = "planner=madpipe, planner=contiguous or planner=pipedream"


class PeriodicEngine(Engine):
    capabilities = Capabilities()

    def __init__(self, config: Config) -> None:
        self.config = config

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """Updates that do not share the micro-batches of a step equally."""
        every, m = self.config.update_every, request.batch.micro_batches
        if every is None or m % every == 0:
            return []
        nearest = divisors.around(m, every)
        mend = " or ".join(f"engine.update_every={number}" for number in nearest)
        return [Problem(f"engine.update_every {every}", f"does not divide batch.micro_batches {m}", mend)]

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        if plan.pattern is None:
            return [_without_pattern()]
        found = [*_recomputed(plan), *_tied(plan, profile)]
        broken = _broken(plan, plan.pattern)
        return [*found, *broken] if broken else [*found, *self._too_few(plan, plan.pattern)]

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """That weights are updated within a step, with gradients one update old: losses are not those of others."""
        every, m = self.update_every(plan), plan.micro_batches
        if every == m:
            return []
        what = f"{m // every} updates a step, of {every} of its {m} micro-batches each, with gradients one update old"
        return [
            Problem(f"engine.update_every {every}", what, f"engine.update_every={m} for one update, as other engines")
        ]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        """Raises CannotRun for a plan without a pattern. What crosses a cut, skips included, is one message."""
        if plan.pattern is None:
            raise CannotRun([_without_pattern()])
        hops = tuple(
            Hop(number, number + 1, "", profile.crossing_bytes(stage.first))
            for number, stage in enumerate(plan.stages[1:])
        )
        return versions.schedule(plan, plan.pattern, plan.micro_batches, self.update_every(plan), hops)

    def update_every(self, plan: Plan) -> int:
        """Micro-batches for each update; raises CannotRun for a plan without a pattern."""
        if self.config.update_every is not None:
            return self.config.update_every
        if plan.pattern is None:
            raise CannotRun([_without_pattern()])
        m = plan.micro_batches
        return versions.allowed(versions.schedule(plan, plan.pattern, m, m), m)[0]

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        return replace(model, versions=versions.VERSIONS)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.periodic.session import PeriodicSession

        if plan.pattern is None:
            raise CannotRun([_without_pattern()])
        if refused := self._too_few(plan, plan.pattern):
            raise CannotRun(refused)
        return PeriodicSession(model, plan, plan.pattern, spec, self.update_every(plan))

    def _too_few(self, plan: Plan, pattern: Pattern) -> list[Problem]:
        """Updates so often that two versions of the weights do not suffice."""
        every, m = self.config.update_every, plan.micro_batches
        if every is None or m % every:
            return []
        order = versions.schedule(plan, pattern, m, m)
        if versions.allows(order, m, every):
            return []
        counts = versions.stored(order)
        most = max(counts)
        what = f"lets stage {counts.index(most)} store {every + 1} micro-batches with 2 versions, it stores {most}"
        mend = next(number for number in versions.allowed(order, m) if number > every)
        return [Problem(f"engine.update_every {every}", what, f"engine.update_every={mend}")]


def _without_pattern() -> Problem:
    return Problem("planner", "gives no pattern, engine=periodic repeats one", PLANNERS)


def _recomputed(plan: Plan) -> list[Problem]:
    if plan.recompute == "never":
        return []
    return [Problem(f"recompute {plan.recompute}", "asks for recomputation, engine=periodic has none", "engine=gpipe")]


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
            f"gives a pattern with {tasks[task]} x {Op(*task[:2])} on device {task[2]}, its plan needs {wanted[task]}",
            PLANNERS,
        )
        for task in wrong[:1]
    ]


def _tied(plan: Plan, profile: ModelProfile) -> list[Problem]:
    """Parameters that stages share, whatever devices the stages are on."""
    key, mend = f"mesh.pipeline {plan.mesh.pipeline}", "engine=gpipe, or mesh.pipeline=1"
    return [
        Problem(key, f"puts {name} into stages {' and '.join(map(str, stages))}, engine=periodic takes it in 1", mend)
        for name, stages in stages_of_tied(plan, profile).items()
        if len(stages) > 1
    ]
