"""A stage of DeepSpeed's pipeline in training."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from engines.deepspeed import library
from engines.deepspeed.session import DeepSpeedSession
from harness.interfaces import Batch
from harness.rank_ties import RankTies
from harness.stage_module import stage_modules
from harness.training_state import make_optimizer


class PipelineSession(DeepSpeedSession):
    """The plan's stages as a `PipelineModule`, with replicas; ZeRO 0 or 1."""

    def build(self, layers: nn.Sequential) -> None:
        from engines.deepspeed.module import Stages
        from engines.deepspeed.state import State
        from engines.deepspeed.watch import Watch

        plan, data = self.plan, self.plan.mesh.data
        stages = stage_modules(layers, plan, range(len(plan.stages)))
        self.own(stages[self.place])
        traffic = library.join(self.library, self.device, data)
        ties = RankTies(layers, plan, self.rank)
        with contextlib.redirect_stdout(None):
            module = Stages(stages, data, self._loss, self.stage.recomputes, ties)
        self.optimizer = make_optimizer(self.stage.parameters(), self.spec.optimizer)
        self.engine = library.engine(self.library, module, self.optimizer, self.config, plan, self.spec)
        self.engine.pipeline_enable_backward_allreduce = data > 1 or self.config.zero > 0
        self.state = State(self.engine, self.stage, self.named(self.stage), self.optimizer)
        self.watch = Watch(self, self.engine, traffic, [copy.op for copy in ties.own])

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """DeepSpeed takes the mean over micro-batches and replicas; a step's loss is the mean over samples.

        It adds up losses in their own format: at least float32 here.
        """
        loss = self.model.loss(output, target)
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return loss * (self.micro_batches * self.plan.mesh.data / self.size)

    def train(self, batch: Batch, size: int) -> float:
        self.size = size
        self.watch.begin()
        self.engine.train_batch(self.pairs(batch))
        total = self.engine.total_loss
        return 0.0 if total is None else float(total) / (self.micro_batches * self.plan.mesh.data)
