"""A rank's stages in training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from engines.torch_pipelining.config import Config
from engines.torch_pipelining.shapes import Shapes
from engines.torch_pipelining.stage import Stage
from harness.interfaces import Batch, Model, SessionSpec
from harness.op import Op
from harness.plan import Plan
from harness.rank_session import RankSession
from harness.rank_ties import RankTies
from harness.schedule.zero import over_replicas
from harness.stage_module import stage_modules
from harness.training_state import (
    load_optimizer_state,
    make_optimizer,
    model_state,
    optimizer_state,
    optimizer_tensors,
)

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


class TorchPipeliningSession(RankSession):
    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config

    def build(self, layers: nn.Sequential) -> None:
        self.shapes = Shapes(layers, self.plan, self.device, self.autocast_dtype)
        numbers = [j for j, stage in enumerate(self.plan.stages) if stage.device == self.place]
        self.modules = stage_modules(layers, self.plan, numbers)
        for module in self.modules:
            module.autocast = self.autocast_dtype
            module.to(self.device)
        self._groups()
        self.ties = RankTies(layers, self.plan, self.rank)
        self._own()
        self.stages: list[Stage] = []
        self.micro_batch: torch.Size | None = None

    def _groups(self) -> None:
        """One for the pipeline of each replica, one for the replicas of each device; every rank makes all of them."""
        width, data = self.width, self.plan.mesh.data
        pipelines = [dist.new_group([r * width + d for d in range(width)]) for r in range(data)]
        replicas = [dist.new_group([r * width + d for r in range(data)]) for d in range(width)] if data > 1 else []
        self.pipeline = pipelines[self.replica]
        self.replicas = replicas[self.place] if replicas else None

    def _own(self) -> None:
        """This rank's parameters, each in the part of the first stage that has it, and in that one's optimizer."""
        self.parameters: dict[str, nn.Parameter] = {}
        self.parts: list[list[nn.Parameter]] = []
        for module in self.modules:
            new = {name: p for name, p in self.named(module).items() if name not in self.parameters}
            self.parameters |= new
            self.parts.append([*new.values()])
        self.optimizers = [make_optimizer(part, self.spec.optimizer) for part in self.parts]

    def train(self, batch: Batch, size: int) -> float:
        self.size = size
        self._prepare(batch.inputs.tensor_split(self.micro_batches)[0])
        for parameter in self.parameters.values():
            parameter.grad = None
        inputs = [batch.inputs.to(self.device)] if self.stages[0].is_first else []
        losses: list[Tensor] = []
        if self.stages[-1].is_last:
            self.schedule.step(*inputs, target=batch.targets.to(self.device), losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        self._sum_over_replicas()
        if self.ties.own:
            self.sent[self.ties.sums] += self.ties.sum_gradients(self.now, self.note)
        self._step()
        return float(sum(loss.detach() for loss in losses))

    def _prepare(self, inputs: Tensor) -> None:
        """Buffers and messages are made for one size of micro-batches."""
        if inputs.shape == self.micro_batch:
            return
        self.micro_batch = inputs.shape
        passing = self.shapes.boundaries(inputs)
        self.stages = [Stage(self, m, passing[m.number], passing[m.number + 1], self.pipeline) for m in self.modules]
        name, m = self.config.schedule, self.micro_batches
        self.schedule: PipelineScheduleSingle | PipelineScheduleMulti
        if name in SINGLE:
            self.schedule = SINGLE[name](self.stages[0], m, loss_fn=self._loss, scale_grads=False)
        else:
            self.schedule = MULTI[name](list(self.stages), m, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.model.loss(output, target) / self.size

    def _sum_over_replicas(self) -> None:
        """The gradients of each stage, in one buffer for each dtype."""
        if self.replicas is None:
            return
        for module, part in zip(self.modules, self.parts, strict=True):
            start, total = self.now(), 0
            gradients = [p.grad for p in part if p.grad is not None]
            for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
                total += self._sum([gradient for gradient in gradients if gradient.dtype == dtype])
            self.note(over_replicas(module.number, "all_reduce", total), start, self.now())
            self.sent["all_reduce"] += total

    def _sum(self, gradients: list[Tensor]) -> int:
        buffer = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(buffer, group=self.replicas)
        for gradient, values in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        return buffer.numel() * buffer.element_size()

    def _step(self) -> None:
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            start = self.now()
            optimizer.step()
            self.note(Op(module.number, "step"), start, self.now())

    def held(self) -> list[Tensor]:
        own = [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]
        received = [buffer for stage in self.stages for buffer in stage.buffers()]
        return [*own, *optimizer_tensors(self.optimizers), *received]

    def local_state(self) -> dict[str, Any]:
        model = {name: value for module in self.modules for name, value in model_state(module).items()}
        return {"model": model, "optimizer": optimizer_state(self.parameters, self.optimizers)}

    def load_local(self, state: dict[str, Any]) -> None:
        for module in self.modules:
            module.load_state_dict({name: state["model"][name] for name in module.state_dict()})
        load_optimizer_state(self.parameters, self.optimizers, state["optimizer"])
