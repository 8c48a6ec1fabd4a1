"""A rank's stages in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _PipelineScheduleRuntime,
)

from engines.torch_pipelining.traced_stage import TracedStage
from harness.core.plan import Plan
from harness.interfaces import Batch, Model, SessionSpec
from harness.runtime.boundary_shapes import BoundaryShapes
from harness.runtime.collectives import new_group
from harness.runtime.stage_module import StageModule, stage_modules
from harness.runtime.stages_session import StagesSession
from harness.runtime.training_state import split_batch
from harness.runtime.values import Value, placed, tensors_of

if TYPE_CHECKING:
    from engines.torch_pipelining.engine import Config

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class TorchPipeliningSession(StagesSession):
    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config

    def build(self, layers: nn.Sequential) -> None:
        self.shapes = BoundaryShapes(layers, self.plan, self.device, self.autocast_dtype)
        super().build(layers)
        width = self.ranks_per_replica
        pipelines = [new_group([r * width + d for d in range(width)]) for r in range(self.plan.mesh.data)]
        self.pipeline = pipelines[self.replica]
        self.stages: list[TracedStage] = []
        self.micro_batch: list[torch.Size] = []
        self.targets: list[Value] = []

    def make_modules(self, layers: nn.Sequential, numbers: Sequence[int]) -> list[StageModule]:
        return stage_modules(layers, self.plan, numbers)

    def train_step(self, batch: Batch, batch_size: int) -> Tensor | float:
        self.batch_size = batch_size
        parts = split_batch(batch, self.plan.micro_batches)
        self._prepare(tensors_of(parts[0].inputs))
        self.stage.zero_grad(set_to_none=True)
        inputs = tensors_of(placed(batch.inputs, self.device)) if self.stages[0].is_first else ()
        losses: list[Tensor] = []
        if self.stages[-1].is_last:
            self.targets = [placed(part.targets, self.device) for part in parts]
            numbers = torch.arange(self.plan.micro_batches)
            self.schedule.step(*inputs, target=numbers, losses=losses, return_outputs=False)
            self.targets = []
        else:
            self.schedule.step(*inputs, return_outputs=False)
        self.update()
        return sum(loss.detach() for loss in losses)

    def _prepare(self, inputs: tuple[Tensor, ...]) -> None:
        """Buffers and messages are made for one size of micro-batches."""
        shapes = [tensor.shape for tensor in inputs]
        if shapes == self.micro_batch:
            return
        self.micro_batch = shapes
        passing = self.shapes.boundaries(inputs)
        self.stages = [
            TracedStage(self, m, passing[m.number], passing[m.number + 1], self.pipeline) for m in self.modules
        ]
        name, m = self.config.schedule, self.plan.micro_batches
        self.schedule: PipelineScheduleSingle | PipelineScheduleMulti
        if self.plan.order:
            self.schedule = self._of_order()
        elif name in SINGLE:
            self.schedule = SINGLE[name](self.stages[0], m, loss_fn=self._loss, scale_grads=False)
        else:
            self.schedule = MULTI[name](list(self.stages), m, loss_fn=self._loss, scale_grads=False)

    def _of_order(self) -> PipelineScheduleMulti:
        """The plan's order, to which torch adds the messages."""
        m = self.plan.micro_batches
        runtime = _PipelineScheduleRuntime(list(self.stages), m, loss_fn=self._loss, scale_grads=False)
        rows = {rank: [_Action.from_str(action) for action in row] for rank, row in enumerate(self.plan.order)}
        runtime._prepare_schedule_with_comms(rows)
        return runtime

    def _loss(self, output: Value, number: Tensor) -> Tensor:
        """The loss of a micro-batch. Its targets may be several tensors, and torch hands out parts of one alone: of the
        micro-batches' numbers."""
        return self.model.loss(output, self.targets[int(number)]) / self.batch_size

    def held_tensors(self) -> list[Tensor]:
        """Return the stages' tensors, and the buffers in which messages arrive."""
        return [*super().held_tensors(), *(buffer for stage in self.stages for buffer in stage.buffers())]
