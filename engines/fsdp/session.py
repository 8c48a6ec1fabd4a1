"""A replica in training that holds a shard of the model."""

from __future__ import annotations

from typing import Any

import torch._dynamo  # noqa: F401  fully_shard imports it: once here, which takes a second, and not in each rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from engines.fsdp.config import Config
from engines.fsdp.sharding import Gathered, sharded
from harness.interfaces import Batch, Model, SessionSpec, StepMetrics
from harness.op import Kind, Op
from harness.plan import Plan
from harness.rank_session import Mark, RankSession
from harness.schedule.zero import over_replicas
from harness.stage_module import stage_modules
from harness.tally import Tally
from harness.training_state import load_optimizer_state, make_optimizer, optimizer_tensors


class FSDPSession(RankSession):
    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config

    def build(self, layers: nn.Sequential) -> None:
        self.tally, self.gathered = Tally(), Gathered()
        self.stage = stage_modules(layers, self.plan, [0])[0].to(self.device)
        mesh = init_device_mesh(self.device.type, (self.plan.mesh.data,))
        self.sharded = sharded(self.stage, mesh, self.config, self.tally, self.gathered)
        self.optimizer = make_optimizer(self.stage.parameters(), self.spec.optimizer)

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        self.gathered.metered = meter
        return super().step(batch, meter)

    def train(self, batch: Batch, size: int) -> float:
        self.stage.zero_grad(set_to_none=True)
        total = 0.0
        for i, (inputs, targets) in enumerate(self.pairs(batch)):
            total += self._task(i, inputs.to(self.device), targets.to(self.device), size)
        began = self.now()
        self.optimizer.step()
        self.note(Op(0, "step"), began, self.now())
        return total

    def _task(self, i: int, inputs: Tensor, targets: Tensor, size: int) -> float:
        """Forward and backward of one micro-batch, each with its collectives."""
        reduces = self.config.reduce_each or i == self.micro_batches - 1
        self.sharded.set_requires_gradient_sync(reduces)
        self.stage.at(self.spec.seed, self.steps, self.number(i))
        began = self.now()
        with self.autocast():
            output = self.stage(inputs)
        self._note_pass("F", i, began, self.now(), "forward", reduces=False)
        loss = self.model.loss(output, targets) / size
        del output
        began = self.now()
        loss.backward()
        self.gathered.show()
        again = "backward" if self.config.reshard_after_forward else None
        self._note_pass("B", i, began, self.now(), again, reduces)
        return float(loss.detach())

    def _note_pass(self, kind: Kind, i: int, start: Mark, end: Mark, gathers: str | None, reduces: bool) -> None:
        """The pass, between one block for all that it gathered and one for all that it reduced.

        |gather|layer|gather|layer|reduce|layer|reduce|  is noted as  |gather gather|layer layer layer|reduce reduce|
        """
        seconds, sizes = self.tally.take()
        self.sent += sizes
        first = start + seconds["all_gather"] if isinstance(start, float) else start  # on a GPU they run beside layers
        last = end - seconds["reduce_scatter"] if isinstance(end, float) else end
        several = self.plan.mesh.data > 1
        if gathers and several:
            self.note(over_replicas(0, "all_gather", 0, i, gathers), start, first)
        self.note(Op(0, kind, i), first, last)
        if reduces and several:
            self.note(over_replicas(0, "reduce_scatter", 0, i), last, end)

    def held(self) -> list[Tensor]:
        state = optimizer_tensors([self.optimizer])
        return [*self.stage.parameters(), *self.stage.buffers(), *state, *self.gathered.tensors]

    def local_state(self) -> dict[str, Any]:
        """Whole tensors, gathered by all ranks. Only the first hands in those that are the same everywhere."""
        model = {name: _whole(tensor) for name, tensor in self.stage.state_dict().items()}
        states = self.optimizer.state
        optimizer = {
            name: {key: _whole(value) for key, value in states[parameter].items()}
            for name, parameter in self.stage.named_parameters()
            if parameter in states
        }
        if self.replica == 0:
            return {"model": model, "optimizer": optimizer}
        return {"model": {name: model[name] for name in self.buffers & model.keys()}, "optimizer": {}}

    def load_local(self, state: dict[str, Any]) -> None:
        own = self.stage.state_dict()
        self.stage.load_state_dict({name: _shard(value, own[name]) for name, value in state["model"].items()})
        named = dict(self.stage.named_parameters())
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
    """This rank's part of a whole tensor that is to be sharded like `like`; each rank has the whole."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return distribute_tensor(value.to(like.device, like.dtype), like.device_mesh, like.placements, src_data_rank=None)
