"""The torch_pipelining engine: torch.distributed.pipelining as its users get it, a process for each device.

| engine.schedule | class                     | stages on each device | micro-batches                     |
|-----------------|---------------------------|-----------------------|-----------------------------------|
| gpipe           | ScheduleGPipe             | 1                     | any number                        |
| 1f1b            | Schedule1F1B              | 1                     | as many as stages, or more        |
| interleaved1f1b | ScheduleInterleaved1F1B   | engine.chunks         | a multiple of the devices         |
| looped_bfs      | ScheduleLoopedBFS         | engine.chunks         | any number                        |
| interleaved_zb  | ScheduleInterleavedZero.. | engine.chunks         | a multiple of the devices         |
| zbv             | ScheduleZBVZeroBubble     | 2, like a V           | any number                        |
| dualpipev       | ScheduleDualPipeV         | 2, like a V           | as many as stages, or more        |
| FILE.csv        | _PipelineScheduleRuntime  | those of the file     | those of the file                 |

A file has the actions of each rank (`harness.schedule.action_file`); torch adds the messages.

What it cannot do:

* No skips but through every stage in between, as further tensors of a tuple: each of them sends and receives them.
* It finds the loss of a micro-batch by counting the last stage's forward passes: a file has these in order.
* It recomputes nothing, and takes no micro-batches of different sizes. (ScheduleInterleaved1F1B takes some numbers of
  them that are no multiple of the devices; `harness.schedule.builders.interleaved`, which predicts it, has none for
  these.)
* Buffers for all messages of a step stay there from the first step on, for every micro-batch.
* 1f1b sends a gradient when it receives the next activation, and waits for both; in the schedule messages leave as soon
  as they are there, so a prediction may be too fast.
* Shapes are found on fake tensors, so a layer may not look at values to decide what to do.
* In zbv's first stage the half of the backward pass for the inputs is empty, and the other half is all of it. Here that
  is so of the first stage with a trained layer, too: torch would compute no gradients of its weights.
* Its messages run next to the tasks, unseen: a trace has tasks and collectives only.

Replicas (`mesh.data`) are this engine's: after the pass the gradients of each stage are summed, all in one buffer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import Fix, Problem
from harness.core.value_checks import one_of
from harness.interfaces import Capabilities, Engine, Model, PlanRequest, Refused, Searched, Session, SessionSpec
from harness.schedule import Schedule, action_file, plan_order
from harness.schedule.action_file import KEY
from harness.schedule.builders.data_parallel import with_replicas
from harness.schedule.families import FAMILIES, chunks_of_file, micro_batch_fixes, wrong_chunks
from harness.schedule.frozen_stages import without_frozen
from harness.schedule.tied_weight_ops import plan_ties, with_ties
from harness.schedule.transfers import plan_transfers

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zbv", "looped_bfs", "interleaved_zb", "dualpipev")
CHUNKS = 2


@dataclass
class Config:
    """`engines.torch_pipelining.engine` says what each schedule asks for, and what the library cannot do."""

    SEARCHED: ClassVar[dict[str, Searched]] = {"schedule": Searched(SCHEDULES[:4], "pipeline")}

    name: str = "torch_pipelining"
    """The engine."""
    schedule: str = "gpipe"
    """Pipeline schedule: gpipe (ScheduleGPipe), 1f1b (Schedule1F1B), interleaved1f1b (ScheduleInterleaved1F1B),
    looped_bfs (ScheduleLoopedBFS), interleaved_zb (ScheduleInterleavedZeroBubble), zbv (ScheduleZBVZeroBubble),
    dualpipev (ScheduleDualPipeV), or a .csv or .json file with the actions of each device."""
    chunks: int = CHUNKS
    """Number of stages on each device with interleaved1f1b, looped_bfs and interleaved_zb; zbv and dualpipev have two,
    the others have one."""


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    if action_file.is_file(config.schedule):
        return [*plan_order.refused(config.schedule), *chunks_of_file(config.chunks, CHUNKS)]
    found = one_of("engine.schedule", config.schedule, SCHEDULES)
    return found or wrong_chunks(config.schedule, config.chunks, CHUNKS, least=2)


@lru_cache(maxsize=4)
def _unsupported(file: str, state: action_file.State) -> tuple[Problem, ...]:
    """What a file that is in a `state` may have, and torch has not: asked again for each number of devices."""
    actions = action_file.read(file)
    other: Fix = {"engine": "pipeline", KEY: file}  # which executes any file
    return (
        *plan_order.recomputed(actions, file, other),
        *plan_order.losses_out_of_order(actions, file, other),
        *plan_order.waiting_pairs(actions, file, other),
    )


def build(config: Config) -> TorchPipeliningEngine:
    return TorchPipeliningEngine(config)


class TorchPipeliningEngine(Engine):
    capabilities = Capabilities(data=True, multi_process=True, by_value=False, sharded_checkpoints=True, halves="zbv")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.file = config.schedule if action_file.is_file(config.schedule) else None
        self.family = FAMILIES.get(config.schedule, FAMILIES["gpipe"])  # `check` refuses a name that is none

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """Numbers of micro-batches; the first fix is one that divides the batch, where there is one."""
        m, n = request.batch.micro_batches, request.pipeline
        if self.file:
            refused = plan_order.refused(self.file, n, m, request.layers)
            if not plan_order.refused(self.file):
                refused += _unsupported(self.file, action_file.state_of(self.file))
            return plan_order.whole(refused, request.batch.size, request.data, cluster.devices)
        if (problem := self._refused(m, n)) is None:
            return []
        shares = request.batch.size // request.data
        return [replace(problem, fixes=micro_batch_fixes(m, shares, lambda count: self._refused(count, n)))]

    def _refused(self, micro_batches: int, devices: int) -> Problem | None:
        """What is wrong with these numbers for the class of torch."""
        if self.config.schedule == "1f1b" and micro_batches < devices:
            message = f"is less than the {devices} stages, which engine.schedule=1f1b needs"
            return Problem("batch.micro_batches", micro_batches, message)
        return self.family.refuses(micro_batches, devices)

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        if plan.order:  # of a run that goes on: the file may have changed since, as `ordered` finds
            return []
        wanted = self.placement(plan.mesh.pipeline)
        found = plan_order.misplaced(plan, wanted, self.config.schedule)
        if self.file or plan.recompute == "never":
            return found
        message = f"asks to recompute {plan.recompute}, engine=torch_pipelining does not recompute"
        return [*found, Problem("planner", None, message, ({"engine": "gpipe"},))]

    def ordered(
        self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, refused: Refused
    ) -> Plan:
        return plan_order.read_into(plan, self.file) if self.file else plan

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        m, n = plan.micro_batches, plan.mesh.pipeline
        transfers = plan_transfers(plan, profile, portals=False)
        if plan.order:
            found = plan_order.schedule(plan, transfers)
        else:
            found = self.family.build(m, n, self.config.chunks, transfers)
        found = with_ties(with_replicas(found, plan, profile), plan_ties(plan, profile), "compute")
        return without_frozen(found, plan, profile)

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        return profile.without_input_gradients(plan.stages[plan.stage_of(profile.frozen_prefix)].last)

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        return replace(model, messages="kept", reducing=1.0)

    def placement(self, pipeline: int) -> tuple[int, ...]:
        if self.file:
            return plan_order.placement(self.file, pipeline)
        return self.family.placement(pipeline, self.config.chunks)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.torch_pipelining.session import TorchPipeliningSession

        return TorchPipeliningSession(model, plan, spec, self.config)
