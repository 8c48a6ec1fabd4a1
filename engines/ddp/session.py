"""A replica in training."""

# No `from __future__ import annotations`: torch reads those of the communication hook.
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch._dynamo  # DDP imports it: once here, which takes a second, and not in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from harness.core.op import Op
from harness.core.plan import Plan
from harness.interfaces import Batch, Model, SessionSpec
from harness.runtime.distributed_session import DistributedSession
from harness.runtime.session import place
from harness.schedule.builders.data_parallel import over_replicas

if TYPE_CHECKING:
    from engines.ddp.engine import Config


class DDPSession(DistributedSession):
    finds_unused = True

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: "Config") -> None:
        super().__init__(model, plan, spec)
        self.config = config
        self.partial = spec.unused or spec.by_value

    def build(self, layers: nn.Sequential) -> None:
        super().build(layers)
        self.last_bucket_full = self.now()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer releases have another name for broadcast_buffers
            self.replicated = DistributedDataParallel(
                self.stage,
                broadcast_buffers=False,  # each replica keeps the running statistics of its own samples
                bucket_cap_mb=self.config.bucket_mb,
                gradient_as_bucket_view=True,
                find_unused_parameters=self.partial,
            )
        self.replicated.register_comm_hook(None, self._all_reduce)

    def _all_reduce(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """Sum a bucket over the replicas; the loss is divided by the whole batch already."""
        buffer = bucket.buffer()
        if self.plan.mesh.data > 1:
            self.bytes_sent["all_reduce"] += buffer.numel() * buffer.element_size()
        self.last_bucket_full = self.now()
        future: Future[list[Tensor]] = dist.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def train_step(self, batch: Batch, batch_size: int) -> Tensor:
        # Gradients stay views of the buckets: without them the micro-batches would accumulate in other tensors. Weights
        # that no replica uses have none, so that optimizers leave them as they are.
        self.replicated.zero_grad(set_to_none=self.partial)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (inputs, targets) in enumerate(self.micro_batches(batch)):
            last = i == self.plan.micro_batches - 1
            with nullcontext() if last else self.replicated.no_sync():
                with self.span("F", i):
                    output = self.replicated(inputs)
                loss = self.model.loss(output, targets) / batch_size
                del output
                self._backward(i, loss, last and self.plan.mesh.data > 1)
                total += loss.detach()
        with self.span("step"):
            if self.unscale():
                self.optimizer.step()
        return total

    def _backward(self, i: int, loss: Tensor, sums: bool) -> None:
        """The last micro-batch's pass ends when the last bucket is full; the rest of the all-reduces follows."""
        start = self.now()
        with self.phase(place("B", self.global_micro_batch(i))):
            self.scaled(loss).backward()
        end = self.now()
        self.record(Op(0, "B", i), start, self.last_bucket_full if sums else end)
        if sums:
            self.record(over_replicas(0, "all_reduce", 0), self.last_bucket_full, end)

    def held_tensors(self) -> list[Tensor]:
        """Gradients, too: they are the buckets."""
        gradients = [parameter.grad for parameter in self.stage.parameters() if parameter.grad is not None]
        return [*super().held_tensors(), *gradients]
