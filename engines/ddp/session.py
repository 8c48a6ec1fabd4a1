"""A replica in training."""

# No `from __future__ import annotations`: torch reads those of the communication hook.
import warnings
from contextlib import nullcontext
from typing import Any

import torch._dynamo  # noqa: F401  DDP imports it: once here, which takes a second, and not in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from engines.ddp.config import Config
from harness.interfaces import Batch, Model, SessionSpec
from harness.op import Op
from harness.plan import Plan
from harness.rank_session import RankSession
from harness.schedule.zero import over_replicas
from harness.stage_module import stage_modules
from harness.training_state import (
    load_optimizer_state,
    make_optimizer,
    model_state,
    optimizer_state,
    optimizer_tensors,
)


class DDPSession(RankSession):
    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config

    def build(self, layers: nn.Sequential) -> None:
        self.stage = stage_modules(layers, self.plan, [0])[0].to(self.device)
        self.optimizer = make_optimizer(self.stage.parameters(), self.spec.optimizer)
        self.full = self.now()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer releases have another name for broadcast_buffers
            self.replicated = DistributedDataParallel(
                self.stage,
                broadcast_buffers=False,  # each replica keeps the running statistics of its own samples
                bucket_cap_mb=self.config.bucket_mb,
                gradient_as_bucket_view=True,
            )
        self.replicated.register_comm_hook(None, self._sum)

    def _sum(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """Sum a bucket over the replicas; the loss is divided by the whole batch already."""
        buffer = bucket.buffer()
        if self.plan.mesh.data > 1:
            self.sent["all_reduce"] += buffer.numel() * buffer.element_size()
        self.full = self.now()
        future: Future[list[Tensor]] = dist.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def train(self, batch: Batch, size: int) -> float:
        # Gradients stay views of the buckets: without them the micro-batches would accumulate beside the buckets.
        self.replicated.zero_grad(set_to_none=False)
        total = 0.0
        for i, (inputs, targets) in enumerate(self.pairs(batch)):
            with self.replicated.no_sync() if i < self.micro_batches - 1 else nullcontext():
                total += self._task(i, inputs.to(self.device), targets.to(self.device), size)
        began = self.now()
        self.optimizer.step()
        self.note(Op(0, "step"), began, self.now())
        return total

    def _task(self, i: int, inputs: Tensor, targets: Tensor, size: int) -> float:
        """Forward and backward of one micro-batch.

        The last backward pass ends when the last bucket is full; behind it comes what is left of the sums.
        """
        self.stage.at(self.spec.seed, self.steps, self.number(i))
        began = self.now()
        with self.autocast():
            output = self.replicated(inputs)
        self.note(Op(0, "F", i), began, self.now())
        loss = self.model.loss(output, targets) / size
        del output
        began = self.now()
        loss.backward()
        end = self.now()
        if i < self.micro_batches - 1 or self.plan.mesh.data == 1:
            self.note(Op(0, "B", i), began, end)
        else:
            self.note(Op(0, "B", i), began, self.full)
            self.note(over_replicas(0, "all_reduce", 0), self.full, end)
        return float(loss.detach())

    def held(self) -> list[Tensor]:
        """Gradients, too: they are the buckets."""
        parameters = [*self.stage.parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [*parameters, *gradients, *self.stage.buffers(), *optimizer_tensors([self.optimizer])]

    def local_state(self) -> dict[str, Any]:
        named = self.named(self.stage)
        return {"model": model_state(self.stage), "optimizer": optimizer_state(named, [self.optimizer])}

    def load_local(self, state: dict[str, Any]) -> None:
        self.stage.load_state_dict(state["model"])
        load_optimizer_state(self.named(self.stage), [self.optimizer], state["optimizer"])
