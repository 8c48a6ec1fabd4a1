"""A stage of DeepSpeed's pipeline in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engines.deepspeed import library
from engines.deepspeed.config import Config
from harness.interfaces import Batch, Model, SessionSpec
from harness.plan import Plan
from harness.rank_session import RankSession
from harness.rank_ties import RankTies
from harness.stage_module import stage_modules
from harness.training_state import make_optimizer


class PipelineSession(RankSession):
    """The plan's stages as a `PipelineModule`, with replicas; ZeRO 0 or 1."""

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config
        self.library = library.load(config.zero)

    def build(self, layers: nn.Sequential) -> None:
        from engines.deepspeed.module import Stages
        from engines.deepspeed.state import State
        from engines.deepspeed.watch import Watch

        plan, data = self.plan, self.plan.mesh.data
        stages = stage_modules(layers, plan, range(len(plan.stages)))
        self.stage = stages[self.place]
        self.stage.autocast = getattr(torch, self.spec.autocast) if self.spec.autocast else None
        self.stage.recomputes = plan.recompute == "always"
        traffic = library.join(self.library, self.device, data)
        ties = RankTies(layers, plan, self.rank)
        with contextlib.redirect_stdout(None):
            module = Stages(stages, data, self._loss, self.stage.recomputes, ties)
        self.optimizer = make_optimizer(self.stage.parameters(), self.spec.optimizer)
        self.engine = library.engine(self.library, module, self.optimizer, self.config, plan, self.spec)
        self.engine.pipeline_enable_backward_allreduce = data > 1 or self.config.zero > 0
        self.state = State(self.engine, self.stage, self.named(self.stage), self.optimizer)
        self.watch = Watch(self, self.engine, self.stage, traffic, [copy.op for copy in ties.own])

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
        self.engine.train_batch(self._pairs(batch))
        total = self.engine.total_loss
        return 0.0 if total is None else float(total) / (self.micro_batches * self.plan.mesh.data)

    def _pairs(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        m = self.micro_batches
        return zip(batch.inputs.tensor_split(m), batch.targets.tensor_split(m), strict=True)

    def held(self) -> list[Tensor]:
        return self.state.held()

    def local_state(self) -> dict[str, Any]:
        return self.state.save()

    def load_local(self, state: dict[str, Any]) -> None:
        self.state.load(state)
