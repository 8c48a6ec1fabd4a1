"""A rank's stages in training."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
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
from harness.nn.skip import named_layers
from harness.nn.tied import moved
from harness.runtime.boundary_shapes import BoundaryShapes
from harness.runtime.distributed_session import DistributedSession
from harness.runtime.stage_module import stage_modules
from harness.runtime.training_state import make_optimizer, split_batch
from harness.runtime.values import placed, tensors_of
from harness.schedule.builders.data_parallel import over_replicas

if TYPE_CHECKING:
    from engines.torch_pipelining.engine import Config

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


class TorchPipeliningSession(DistributedSession):
    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config

    def build(self, layers: nn.Sequential) -> None:
        self.shapes = BoundaryShapes(layers, self.plan, self.device, self.autocast_dtype)
        numbers = [j for j, stage in enumerate(self.plan.stages) if stage.device == self.pipeline_rank]
        self.modules = stage_modules(layers, self.plan, numbers)
        for module in self.modules:
            module.autocast = self.autocast_dtype
        named = [pair for module in self.modules for pair in named_layers(module)]
        self.stage = moved(nn.Sequential(OrderedDict(named)), self.device)
        self._groups()
        self.tie_weights(layers)
        self._own()
        self.stages: list[TracedStage] = []
        self.micro_batch: list[torch.Size] = []

    def _groups(self) -> None:
        """Create a process group for the pipeline of each replica and one for the replicas of each stage, on every
        rank."""
        width, data = self.ranks_per_replica, self.plan.mesh.data
        pipelines = [dist.new_group([r * width + d for d in range(width)]) for r in range(data)]
        self.pipeline, self.replicas = pipelines[self.replica], self.replica_group()

    def _own(self) -> None:
        """Collect this rank's parameters; a shared one belongs to the first stage that has it, and to its optimizer."""
        seen: set[nn.Parameter] = set()
        self.parts: list[list[nn.Parameter]] = []
        for module in self.modules:
            self.parts.append([parameter for parameter in module.parameters() if parameter not in seen])
            seen.update(self.parts[-1])
        self.stage_optimizers = [make_optimizer(part, self.spec.optimizer) for part in self.parts]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.stage_optimizers

    def train_step(self, batch: Batch, batch_size: int) -> float:
        self.batch_size = batch_size
        self._prepare(tensors_of(split_batch(batch, self.plan.micro_batches)[0].inputs))
        self.stage.zero_grad(set_to_none=True)
        inputs = tensors_of(placed(batch.inputs, self.device)) if self.stages[0].is_first else ()
        losses: list[Tensor] = []
        if self.stages[-1].is_last:
            self.schedule.step(*inputs, target=batch.targets.to(self.device), losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        self._sum_over_replicas()
        self.sum_tied_gradients()
        self._step()
        return float(sum(loss.detach() for loss in losses))

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
            runtime = _PipelineScheduleRuntime(list(self.stages), m, loss_fn=self._loss, scale_grads=False)
            runtime._prepare_schedule_with_comms(
                {rank: [_Action.from_str(action) for action in row] for rank, row in enumerate(self.plan.order)}
            )
            self.schedule = runtime
        elif name in SINGLE:
            self.schedule = SINGLE[name](self.stages[0], m, loss_fn=self._loss, scale_grads=False)
        else:
            self.schedule = MULTI[name](list(self.stages), m, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.model.loss(output, target) / self.batch_size

    def _sum_over_replicas(self) -> None:
        """The gradients of each stage, in one buffer for each dtype."""
        if self.replicas is None:
            return
        for module, part in zip(self.modules, self.parts, strict=True):
            start, total = self.now(), 0
            gradients = [p.grad for p in part if p.grad is not None]
            for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
                total += self._sum([gradient for gradient in gradients if gradient.dtype == dtype])
            self.record(over_replicas(module.number, "all_reduce", total), start, self.now())
            self.bytes_sent["all_reduce"] += total

    def _sum(self, gradients: list[Tensor]) -> int:
        buffer = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(buffer, group=self.replicas)
        for gradient, values in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        return buffer.numel() * buffer.element_size()

    def _step(self) -> None:
        for module, optimizer in zip(self.modules, self.stage_optimizers, strict=True):
            with self.span("step", stage=module.number):
                optimizer.step()

    def held_tensors(self) -> list[Tensor]:
        """Return the stages' tensors, and the buffers in which messages arrive."""
        return [*super().held_tensors(), *(buffer for stage in self.stages for buffer in stage.buffers())]
