"""A stage of DeepSpeed's pipeline in training."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from engines.deepspeed import load_deepspeed
from engines.deepspeed.session import DeepSpeedSession
from harness.interfaces import Batch
from harness.runtime.stage_module import stage_modules
from harness.runtime.training_state import make_optimizer, split_batch


class PipelineSession(DeepSpeedSession):
    """The plan's stages as a `PipelineModule`, with replicas; ZeRO 0 or 1."""

    def build(self, layers: nn.Sequential) -> None:
        from engines.deepspeed.pipeline_module import Stages
        from engines.deepspeed.pipeline_tracer import PipelineTracer
        from engines.deepspeed.state_dict import State

        plan, data = self.plan, self.plan.mesh.data
        stages = stage_modules(layers, plan, range(len(plan.stages)))
        self.own(stages[self.pipeline_rank])
        traffic = load_deepspeed.join(self.library, self.device, data, self.now)
        self.tie_weights(layers)
        with contextlib.redirect_stdout(None):
            module = Stages(stages, data, self._loss, self.stage.recomputes, self.tied)
        self.updates_with(make_optimizer(self.stage.parameters(), self.spec.optimizer))
        self.engine = load_deepspeed.engine(self.library, module, self.optimizer, self.config, plan, self.spec)
        self.engine.pipeline_enable_backward_allreduce = data > 1 or self.config.zero > 0
        self.state = State(self.engine, self.stage, self.named_parameters(), self.optimizer)
        self.watch = PipelineTracer(self, self.engine, traffic, [copy.op for copy in self.tied.copies])

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """DeepSpeed takes the mean over micro-batches and replicas; a step's loss is the mean over samples.

        It adds up losses in their own format: at least float32 here.
        """
        loss = self.model.loss(output, target)
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return loss * (self.plan.micro_batches * self.plan.mesh.data / self.batch_size)

    def train_step(self, batch: Batch, batch_size: int) -> Tensor | float:
        self.batch_size = batch_size
        self.watch.begin()
        self.engine.train_batch((part.inputs, part.targets) for part in split_batch(batch, self.plan.micro_batches))
        total = self.engine.total_loss
        return 0.0 if total is None else total.double() / (self.plan.micro_batches * self.plan.mesh.data)
