"""A replica in training that holds a shard of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from engines.fsdp.mixed_precision import explained, keep_statistics, policy
from engines.fsdp.sharded_stage import Gathered, refuse_hooks, sharded
from harness.core.op import Kind, Op
from harness.core.plan import Plan
from harness.interfaces import Batch, Model, SessionSpec, StepMetrics
from harness.runtime.collectives import CollectiveCounter
from harness.runtime.device_clock import TimePoint
from harness.runtime.distributed_session import DistributedSession
from harness.runtime.gradient_norms import norms_of
from harness.runtime.session import place
from harness.runtime.training_state import load_optimizer_state, make_optimizer
from harness.runtime.values import Value
from harness.schedule.builders.data_parallel import over_replicas

if TYPE_CHECKING:
    from engines.fsdp.engine import Config


class FSDPSession(DistributedSession):
    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config

    def build(self, layers: nn.Sequential) -> None:
        self.counter, self.gathered = CollectiveCounter(self.now), Gathered()
        self.stage = self.own_stage(layers)
        refuse_hooks(self.stage)
        self.policy = policy(self.config, self.spec)
        if self.policy.param_dtype:
            self.stage.autocast = None
            keep_statistics(self.stage)
        mesh = init_device_mesh(self.device.type, (self.plan.mesh.data,))
        self.sharded = sharded(self.stage, mesh, self.config, self.policy, self.counter, self.gathered)
        self.optimizer = make_optimizer(self.stage.parameters(), self.spec.optimizer)

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        self.gathered.metered = meter
        return super().step(batch, meter)

    def train_step(self, batch: Batch, batch_size: int) -> Tensor:
        self.stage.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (inputs, targets) in enumerate(self.micro_batches(batch)):
            total += self._task(i, inputs, targets, batch_size)
        with self.span("step"):
            self.optimizer.step()
        return total

    def _task(self, i: int, inputs: Value, targets: Value, batch_size: int) -> Tensor:
        """Forward and backward of one micro-batch, each with its collectives."""
        reduces = self.config.reduce_each or i == self.plan.micro_batches - 1
        self.sharded.set_requires_gradient_sync(reduces)
        start = self.now()
        with self.phase(place("F", self.global_micro_batch(i))), explained(self.policy):
            output = self.stage(inputs)
        self._record_pass("F", i, start, "forward", reduces=False)
        with explained(self.policy):
            loss = self.model.loss(output, targets) / batch_size
        del output
        start = self.now()
        with self.phase(place("B", self.global_micro_batch(i))):
            loss.backward()
        self.gathered.show()
        self.gathered.refuse_writes()
        self._record_pass("B", i, start, "backward" if self.config.reshard_after_forward else None, reduces)
        return loss.detach()

    def _record_pass(self, kind: Kind, i: int, start: TimePoint, gathers: str | None, reduces: bool) -> None:
        """The pass since `start`, between one block for all that it gathered and one for all that it reduced.

        |gather|layer|gather|layer|reduce|layer|reduce|  becomes  |gather gather|layer layer layer|reduce reduce|
        """
        end, several = self.now(), self.plan.mesh.data > 1
        held, sizes = self.counter.take()
        self.bytes_sent += sizes
        self.collectives += self.counter.take_calls()

        def add() -> None:
            start_s, end_s = self.clock.seconds(start), self.clock.seconds(end)
            first_s = start_s + self.clock.total_s(held["all_gather"])
            last_s = end_s - self.clock.total_s(held["reduce_scatter"])
            if gathers and several:
                self.add_span(over_replicas(0, "all_gather", 0, i, gathers), start_s, first_s)
            self.add_span(Op(0, kind, i), first_s, last_s)
            if reduces and several:
                self.add_span(over_replicas(0, "reduce_scatter", 0, i), last_s, end_s)

        self.record_later(add)

    @property
    def split_over_replicas(self) -> bool:
        return True

    def gradient_norms(self) -> dict[str, float]:
        """Return the norms of this rank's shards of the gradients."""
        found = {name: one.grad for name, one in self.stage.named_parameters() if one.grad is not None}
        shards = {name: one.to_local() for name, one in found.items() if isinstance(one, DTensor)}
        named = {f"a shard of {name}" if name in shards else name: shards.get(name, one) for name, one in found.items()}
        return norms_of(named)

    def held_tensors(self) -> list[Tensor]:
        return [*super().held_tensors(), *self.gathered.tensors]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters, which shards have taken the place of, by name."""
        return dict(self.stage.named_parameters())

    def local_state(self) -> dict[str, Any]:
        """Whole tensors, gathered by all ranks. Only the first hands in those that are the same everywhere."""
        own = self.own_tensors()
        model = {name: _whole(tensor) for name, tensor in own["model"].items()}
        optimizer = {
            name: {key: _whole(value) for key, value in kept.items()} for name, kept in own["optimizer"].items()
        }
        if self.replica == 0:
            return {"model": model, "optimizer": optimizer}
        return {"model": {name: model[name] for name in self.buffer_names & model.keys()}, "optimizer": {}}

    def load_local_state(self, state: dict[str, Any]) -> None:
        own = self.stage.state_dict()
        self.stage.load_state_dict({name: _shard(value, own[name]) for name, value in state["model"].items()})
        named = self.named_parameters()
        saved = {
            name: {key: _shard(value, named[name]) for key, value in values.items()}
            for name, values in state["optimizer"].items()
        }
        load_optimizer_state(named, [self.optimizer], saved)


def _whole(value: Any) -> Any:
    """A copy on the CPU, of a sharded tensor the whole: collective."""
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()


def _shard(value: Any, like: Tensor) -> Any:
    """Return this rank's part of a whole tensor, sharded like `like`; each rank passes the whole, or its shard."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    return distribute_tensor(value.to(like.device, like.dtype), like.device_mesh, like.placements, src_data_rank=None)
