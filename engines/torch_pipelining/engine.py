"""The torch_pipelining engine: torch.distributed.pipelining as its users get it, a process for each device.

| engine.schedule | class                     | stages on each device | micro-batches                     |
|-----------------|---------------------------|-----------------------|-----------------------------------|
| gpipe           | ScheduleGPipe             | 1                     | any number                        |
| 1f1b            | Schedule1F1B              | 1                     | as many as stages, or more        |
| interleaved1f1b | ScheduleInterleaved1F1B   | engine.chunks         | a multiple of the devices         |
| zbv             | ScheduleZBVZeroBubble     | 2, like a V           | any number                        |

What it cannot do:

* No skips but through every stage in between, as further tensors of a tuple: each of them sends and receives them.
* It recomputes nothing, and takes no micro-batches of different sizes. (ScheduleInterleaved1F1B takes some numbers of
  them that are no multiple of the devices; `harness.schedule.interleaved`, which predicts it, has none for these.)
* Buffers for all messages of a step stay there from the first step on, for every micro-batch.
* 1f1b sends a gradient when it receives the next activation, and waits for both; in the schedule messages leave as soon
  as they are there, so a prediction may be too fast.
* Shapes are found on fake tensors, so a layer may not look at values to decide what to do.
* In zbv's first stage the half of the backward pass for the inputs is empty, and the other half is all of it.
* Its messages run beside the tasks, unseen: a trace has tasks and collectives only.

Replicas (`mesh.data`) are this engine's: after the pass the gradients of each stage are summed, all in one buffer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from engines.torch_pipelining.config import Config
from harness import divisors
from harness.cluster import Cluster
from harness.interfaces import Capabilities, Engine, Model, PlanRequest, Session, SessionSpec
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.fill_drain import fill_drain
from harness.schedule.hops import plan_hops
from harness.schedule.interleaved import interleaved
from harness.schedule.one_f_one_b import one_f_one_b
from harness.schedule.ties import plan_ties, with_ties
from harness.schedule.zero import over_replicas
from harness.schedule.zero_bubble import zbv


class TorchPipeliningEngine(Engine):
    capabilities = Capabilities(data=True, ranks=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """Numbers of micro-batches; the mend is one that shares the batch equally, where there is one."""
        m, n = request.batch.micro_batches, request.pipeline
        shares = divisors.of(max(1, request.batch.size // request.data))
        if self.config.schedule == "1f1b" and m < n:
            what = f"is less than the {n} stages, which engine.schedule=1f1b needs"
            right = [count for count in shares if count >= n][:1]
        elif self.config.schedule == "interleaved1f1b" and m % n:
            what = f"is no multiple of the {n} devices of the pipeline"
            right = sorted((count for count in shares if count % n == 0), key=lambda count: abs(count - m))[:1]
        else:
            return []
        mends = [*(f"batch.micro_batches={count}" for count in right), "engine.schedule=gpipe"]
        return [Problem(f"batch.micro_batches {m}", what, ", or ".join(mends))]

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        return [*self._misplaced(plan), *_recomputed(plan)]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        m, n = plan.micro_batches, plan.mesh.pipeline
        devices = [stage.device for stage in plan.stages]
        hops = plan_hops(plan, profile, portals=False)
        if self.config.schedule == "gpipe":
            found = fill_drain(m, devices, hops)
        elif self.config.schedule == "1f1b":
            found = one_f_one_b(m, devices, hops)
        elif self.config.schedule == "interleaved1f1b":
            found = interleaved(m, n, self.config.chunks, hops)
        else:
            found = zbv(m, n, hops)
        return with_ties(_with_replicas(found, plan, profile), plan_ties(plan, profile), "compute")

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        return replace(model, messages="kept", reducing=1.0)

    def placement(self, pipeline: int) -> tuple[int, ...]:
        if self.config.schedule == "interleaved1f1b":
            return tuple(range(pipeline)) * self.config.chunks
        if self.config.schedule == "zbv":
            return (*range(pipeline), *reversed(range(pipeline)))
        return ()

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.torch_pipelining.session import TorchPipeliningSession

        return TorchPipeliningSession(model, plan, spec, self.config)

    def _misplaced(self, plan: Plan) -> list[Problem]:
        n = plan.mesh.pipeline
        devices = tuple(stage.device for stage in plan.stages)
        wanted = self.placement(n) or tuple(range(n))
        if devices == wanted:
            return []
        asked = f"engine.schedule={self.config.schedule} on {_listed(wanted)}"
        what = f"has its stages on devices {_listed(devices)}, {asked}"
        return [Problem("the plan", what, "planner=balance, or planner=contiguous")]


def _recomputed(plan: Plan) -> list[Problem]:
    if plan.recompute == "never":
        return []
    what = "asks for recomputation, engine=torch_pipelining has none"
    return [Problem(f"recompute {plan.recompute}", what, "engine=gpipe")]


def _listed(devices: tuple[int, ...]) -> str:
    return ", ".join(map(str, devices))


def _with_replicas(schedule: Schedule, plan: Plan, profile: ModelProfile) -> Schedule:
    """The sums over replicas, stage by stage, before the optimizer.

    device 0   0B1  2B1  |0collective:all_reduce@data  2collective:all_reduce@data|  0step  2step
    """
    if plan.mesh.data == 1:
        return schedule
    lanes = []
    for lane in schedule.lanes:
        if lane.queue == "compute":
            tasks = tuple(op for op in lane.ops if op.kind != "step")
            steps = lane.ops[len(tasks) :]
            sums = (over_replicas(op.stage, "all_reduce", _own_bytes(plan, profile, op.stage)) for op in steps)
            lane = replace(lane, ops=(*tasks, *sums, *steps))
        lanes.append(lane)
    return replace(schedule, lanes=tuple(lanes), replicas=plan.mesh.data)


def _own_bytes(plan: Plan, profile: ModelProfile, number: int) -> int:
    """Bytes of a stage's parameters, less those that an earlier stage of its device has."""
    stage = plan.stages[number]
    earlier = [k for s in plan.stages[:number] if s.device == stage.device for k in range(s.first, s.last + 1)]
    own = range(stage.first, stage.last + 1)
    return profile.parameter_bytes_of([*earlier, *own]) - profile.parameter_bytes_of(earlier)
