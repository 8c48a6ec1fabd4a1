"""A model in training by a pattern."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from engines.periodic import weight_versions
from engines.periodic.device_queues import DeviceQueues
from engines.periodic.step import Program, Step
from engines.periodic.versioned_stage import VersionedStage
from engines.periodic.weight_versions import CopyPlan
from harness.core.pattern import Pattern
from harness.core.plan import Plan
from harness.core.problem import refuse
from harness.interfaces import Batch, Model, SessionSpec
from harness.nn.skip import frozen_prefix, named_layers
from harness.nn.tied import move_apart
from harness.runtime.delayed_optimizer import whole_state
from harness.runtime.gradient_norms import UpdateNorms
from harness.runtime.local_session import LocalSession
from harness.runtime.memory_meter import DeviceMemory
from harness.runtime.stage_module import stage_modules
from harness.schedule.frozen_stages import leave_out
from harness.schedule.transfers import Transfer
from harness.schedule.validate import validation_errors

if TYPE_CHECKING:
    from engines.periodic.engine import Config


class PeriodicSession(LocalSession):
    """A session with several versions of each stage's weights, updated every `every` micro-batches."""

    def __init__(
        self, model: Model, plan: Plan, pattern: Pattern, spec: SessionSpec, config: Config, every: int
    ) -> None:
        super().__init__(model, plan, spec)
        self.pattern, self.every = pattern, every
        self.versions, self.corrections = config.versions, config.corrections
        self.made = 0  # updates of the run
        self.programs: dict[int, tuple[Program, list[CopyPlan]]] = {}

    def build(self, layers: nn.Sequential) -> None:
        plan = self.plan
        self.parameter_names = [name for name, _ in layers.named_parameters()]
        self.prefix = frozen_prefix(named_layers(layers))
        modules = stage_modules(layers, plan, range(len(plan.stages)))
        move_apart(modules, [stage.device for stage in plan.stages], self.devices)
        self.stages = [
            VersionedStage(module, self.devices[stage.device], self.spec, self.corrections)
            for module, stage in zip(modules, plan.stages, strict=True)
        ]
        names = {parameter: name for name, parameter in self.named_parameters().items()}
        self.updates = UpdateNorms([stage.optimizer.optimizer for stage in self.stages], names)
        self.queues = DeviceQueues(plan, self.spec.devices)
        self._program(plan.micro_batches)  # with the copies that it needs

    def __exit__(self, *error: object) -> None:
        self.queues.close()

    def train_step(self, batch: Batch) -> float:
        """All updates of the batch. After an error some stages may have been updated, and others not."""
        self.updates.begin()
        m = min(self.plan.micro_batches, len(batch))
        program = self._program(m)
        key = (self.spec.seed, self.steps)
        run = Step(self.stages, self.queues, self.model, batch, m, self.every, key, self.made)
        run.execute(program)
        self.made += math.ceil(m / self.every)
        self.spans = run.spans
        self.bytes_sent.update(run.bytes_sent)
        return run.loss()

    def _program(self, micro_batches: int) -> Program:
        """Raises `CannotRun` for a pattern that cannot be executed: nothing may wait for ever."""
        if micro_batches not in self.programs:
            cuts = tuple(Transfer(number, number + 1) for number in range(len(self.stages) - 1))
            schedule = weight_versions.schedule(self.plan, self.pattern, micro_batches, self.every, cuts)
            refuse(validation_errors(schedule), "this pattern")
            copies = weight_versions.copy_plans(schedule, self.pattern, self.versions, self.every, self.corrections)
            self.programs[micro_batches] = Program(leave_out(schedule, self.plan, self.prefix, {})), copies
        program, copies = self.programs[micro_batches]
        for stage, own in zip(self.stages, copies, strict=True):
            stage.prepare(own)
        return program

    def held_by_device(self) -> dict[int, list[Tensor]]:
        held: dict[int, list[Tensor]] = defaultdict(list)
        for stage, planned in zip(self.stages, self.plan.stages, strict=True):
            held[planned.device] += stage.held()
        return held

    def count_memory(self, meters: Mapping[int, DeviceMemory]) -> None:
        self.queues.counted_by(meters)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizers own; each update uses up their gradients."""
        return {name: parameter for stage in self.stages for name, parameter in stage.own.items()}

    @property
    def pass_modules(self) -> nn.Module:
        return nn.ModuleList([copied for stage in self.stages for copied in stage.copies])

    def gradient_norms(self) -> dict[str, float]:
        return self.updates.norms()

    def local_state(self) -> dict[str, Any]:
        """Return the state with the newest weights."""
        return whole_state(self.stages, self.parameter_names)

    def load_local_state(self, state: dict[str, Any]) -> None:
        for stage in self.stages:
            stage.load(state["model"], state["optimizer"])
        self.made = state["step"] * math.ceil(self.plan.micro_batches / self.every)
