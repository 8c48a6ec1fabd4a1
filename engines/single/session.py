"""A model in training on one device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from harness.core.op import Op
from harness.core.plan import Plan
from harness.interfaces import Batch, Model, SessionSpec
from harness.measure.layer_chain import tensors
from harness.nn import batchnorm, dropout
from harness.nn.tied import moved
from harness.runtime.graphed_layers import GraphedLayers
from harness.runtime.local_session import LocalSession
from harness.runtime.recomputation import Before, ForwardState
from harness.runtime.training_state import make_optimizer
from harness.runtime.values import Value, mapped
from harness.schedule.builders.gpipe import recomputed

if TYPE_CHECKING:
    from engines.single.engine import Config


class SingleSession(LocalSession):
    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config
        self.threads = config.threads or len(os.sched_getaffinity(0))

    def build(self, layers: nn.Sequential) -> None:
        if self.config.deferred_batch_norm:
            layers = batchnorm.deferred(layers, self.plan.micro_batches)
        self.stage = moved(layers, self.device)
        self.state = ForwardState(self.stage.modules(), "stage 0")
        self.graphed = GraphedLayers(self.stage, self.device) if self.spec.cuda_graphs else None
        self.draws_masks = dropout.used(self.stage.modules())
        self.optimizer = make_optimizer(self.stage.parameters(), self.spec.optimizer)

    def train_step(self, batch: Batch) -> Tensor:
        self.stage.zero_grad(set_to_none=True)
        if self.graphed:
            self.graphed.zero_grad()
        m = min(self.plan.micro_batches, len(batch))
        batchnorm.begin(self.stage, m)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for i, (inputs, targets) in enumerate(self.micro_batches(batch)):
            task = _Task(self, i, recomputed(i, m, self.plan.recompute))
            total += task.run(inputs, targets, len(batch))
        with self.span("step"):
            if self.unscale():
                self.optimizer.step()
        return total


class _Task:
    """Forward and backward of one micro-batch."""

    def __init__(self, session: SingleSession, i: int, recompute: bool) -> None:
        self.session, self.i, self.recompute = session, i, recompute
        self.before: Before | None = None

    def run(self, inputs: Value, targets: Value, batch_size: int) -> Tensor:
        session = self.session
        with session.span("F", self.i), session.autocast(), set_checkpoint_early_stop(False):
            output = checkpoint(self._forward, inputs, use_reentrant=False) if self.recompute else self._forward(inputs)
        loss = session.model.loss(output, targets) / batch_size
        del output
        self.backward_start = session.now()
        session.scaled(loss).backward()
        session.record(Op(0, "B", self.i), self.backward_start, session.now())
        return loss.detach()

    def _forward(self, inputs: Value) -> Any:
        """The layers; torch's checkpoint calls this a second time in the backward pass."""
        session = self.session
        start = session.now()
        with dropout.keyed(session.spec.seed, session.steps, self.i):
            if not self.recompute:
                return self._layers(inputs)
            inputs = mapped(torch.clone, inputs)  # for layers that work in place
            if self.before is None:
                with session.state.first_run() as self.before:
                    output = self._layers(inputs)
                self.before.same_outputs(tensors(output))
                return output
            with session.state.recomputation(self.before):
                output = self._layers(inputs)
            self.before.same_outputs(tensors(output))
            self.backward_start = session.now()
            session.record(Op(0, "R", self.i), start, self.backward_start)
            return output

    def _layers(self, inputs: Value) -> Any:
        output = (self.session.graphed or self.session.stage)(inputs)
        if self.session.draws_masks:
            dropout.remember(tensors(output))
        return output
