"""A rank in training: its blocks of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.sbp import batchnorm_passes
from engines.sbp.block_collectives import BlockCollectives, Groups
from engines.sbp.block_layout import Dim, Mesh
from engines.sbp.gradient_sync import GradientSync
from engines.sbp.program import program
from engines.sbp.same_plan import check_same_plan
from engines.sbp.shard_model import ModelSharder
from engines.sbp.sharded_cross_entropy import SplitClasses, split_loss
from engines.sbp.sharded_layers import BatchNorm, mine
from engines.sbp.sharded_state import Shard
from engines.sbp.stage_p2p import StageP2P
from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.interfaces import Batch, Model, SessionSpec
from harness.measure.count_model import count
from harness.nn.tied import moved
from harness.runtime.autograd import differentiable
from harness.runtime.collectives import CollectiveCounter
from harness.runtime.device_clock import TimePoint
from harness.runtime.distributed_session import DistributedSession
from harness.runtime.session import place
from harness.runtime.stage_module import StageModule
from harness.runtime.stage_passes import StagePasses
from harness.runtime.state_shards import Blocks
from harness.runtime.training_state import (
    load_optimizer_state,
    make_optimizer,
    pinned_as,
)
from harness.runtime.values import Value, mapped, tensors_of
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import OUTPUT, grid_from_plan
from harness.schedule import Schedule
from harness.schedule.builders.tensor_parallel import PHASES, traffic_op
from harness.schedule.dependency_graph import REDUCING, split_part
from harness.simulator.lowering import sent_kind

if TYPE_CHECKING:
    from engines.sbp.engine import Config

SAMPLES = 7
"""Samples of the micro-batch on the meta device that records the order of modules, and by which it is seen what has
samples as its first dimension: few other dimensions are a prime like this."""


class SBPSession(DistributedSession):
    stage: StageModule

    def __init__(
        self,
        model: Model,
        plan: Plan,
        spec: SessionSpec,
        config: Config,
        schedule: Callable[[Plan, ModelProfile], Schedule],
    ) -> None:
        super().__init__(model, plan, spec)
        self.config = config
        self.ran: list[str] = []
        profile = count(model, SAMPLES, spec.dtype, spec.autocast, self.ran.append)
        self.queues = schedule(plan, profile).by_queue()
        self.mesh = Mesh(grid_from_plan(plan))
        self.program = program(plan, chain_from_profile(profile), self.mesh)
        self.apart = [layer.name for layer in profile.layers if layer.traits.whole_draws and self.mesh.devices > 1]

    def build(self, layers: nn.Sequential) -> None:
        check_same_plan(self.plan)
        self.counter = CollectiveCounter(self.now)
        groups = Groups(self.mesh, self.rank - self.tensor_rank, self.tensor_rank)
        self.by = BlockCollectives(self.mesh, groups, self.counter, self.config.aligned)
        splitter = ModelSharder(layers, self.program, self.by, self.config.local_statistics, self.apart)
        splitter.split(self.ran)
        self.shards: dict[str, Shard] = splitter.shards
        self.local = splitter.local
        moved(layers, self.device)
        if self.device.type == "cpu" and any(isinstance(layer, BatchNorm) for layer in layers.modules()):
            batchnorm_passes.compiled()  # here, so that no step waits for it
        ranks = dist.get_world_size()
        digits = self.program.groups | splitter.norms | ({self.classes} if self.classes else set())
        groups.make("activations", digits, ranks)
        groups.make("gradients", GradientSync.wanted(self.shards), ranks)
        self.parameter_names = {parameter: name for name, parameter in layers.named_parameters()}
        every = layers.named_parameters(remove_duplicate=False)
        self.shared = {name: self.parameter_names[parameter] for name, parameter in every}
        self.stage = self.own_stage(layers)
        self.parameters = self.named_parameters()
        self.gradients = GradientSync(self.parameters, self.shards, self.mesh, groups, self.counter, self.config)
        self.tie_weights(layers)
        self.optimizer = make_optimizer(self.parameters.values(), self.spec.optimizer)
        self.split = self._split_classes()
        self.ops, self.ops_after_sums = _parted(self.queues[self.pipeline_rank, "compute"])
        self.neighbours = StageP2P(self.rank, self.pipeline_rank, self.plan.mesh.tensor, self.device)

    @property
    def classes(self) -> tuple[int, ...]:
        """The digits that split the output's features."""
        return tuple(sorted(self.program.end.columns.split))

    def share(self, batch: Batch) -> Batch:
        """Return this rank's part of the replica's samples, micro-batch by micro-batch."""
        whole, start, end = super().share(batch), self.program.start, self.program.end

        def part(tensor: Tensor) -> Tensor:
            rows = self._rows(tensor, start.rows)
            if start.columns.split:
                rows = rows.index_select(1, mine(start.columns, rows.shape[1], self.by, rows.device))
            return pinned_as(tensor, rows)

        def classes(tensor: Tensor) -> Tensor:
            return pinned_as(tensor, self._rows(tensor, end.rows))

        return Batch(mapped(part, whole.inputs), mapped(classes, whole.targets))

    def _rows(self, tensor: Tensor, dim: Dim) -> Tensor:
        if not dim.split:
            return tensor
        parts = tensor.tensor_split(self.plan.micro_batches)
        return torch.cat([one.index_select(0, mine(dim, len(one), self.by, one.device)) for one in parts])

    def entering(self, batch: Batch) -> Iterator[tuple[Value, Value]]:
        """The inputs and the targets of each micro-batch."""
        wanted = OUTPUT in self.plan.layouts
        for inputs, targets in self.micro_batches(batch):
            for tensor in tensors_of(inputs) if wanted else ():  # its gradient is a part of what is planned
                tensor.requires_grad_(differentiable(tensor))
            yield inputs, targets

    def train_step(self, batch: Batch, batch_size: int) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        self.passes = StagePasses(self.stage)
        self.batches = dict(enumerate(self.entering(batch)))
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)
        for op in self.ops:
            self._run(op, batch_size)
        self._sum_gradients()
        for op in self.ops_after_sums:
            self._run(op, batch_size)
        return self.total

    def _sum_gradients(self) -> None:
        """All sums of gradients: of weights and of what is small, then over the stages that share a parameter."""
        began = self.now()
        self.gradients.finish()
        self._note(None, began, self.now())
        self.sum_tied_gradients()

    def _run(self, op: Op, batch_size: int) -> None:
        began = self.now()
        number = None if op.micro_batch is None else self.global_micro_batch(op.micro_batch)
        with self.phase(place(op.kind, number), waits=op.kind == "recv"):
            self._do(op, batch_size)
        if op.kind in ("F", "B"):
            self._note(op, began, self.now())
        else:
            self.record(op, began, self.now())

    def _do(self, op: Op, batch_size: int) -> None:
        if op.kind == "F":
            self._forward(op)
        elif op.kind == "B":
            self._backward(op, batch_size)
        elif op.kind == "step":
            self.optimizer.step()
        else:
            sent, kind = self._message(op), sent_kind(op, self.plan.devices)
            if kind:
                self.bytes_sent[kind] += sent

    def _message(self, op: Op) -> int:
        """A send or a receive; the bytes that were sent."""
        assert op.micro_batch is not None
        if op.kind == "send":
            return self.neighbours.send(op, self.passes.leaving(op.micro_batch, op.part, op.forward))
        self.passes.arrived(op.micro_batch, op.part, self.neighbours.receive(op), op.forward)
        return 0

    def _forward(self, op: Op) -> None:
        assert op.micro_batch is not None
        i = op.micro_batch
        self.use_micro_batch(i)
        self.passes.forward(i, self.batches[i][0] if self.pipeline_rank == 0 else None)

    def _backward(self, op: Op, batch_size: int) -> None:
        assert op.micro_batch is not None
        i = op.micro_batch
        self.gradients.last = i == self.plan.micro_batches - 1
        _, targets = self.batches.pop(i)
        if self.pipeline_rank < len(self.plan.stages) - 1:
            self.passes.backward(i, None)
            return
        loss = split_loss(self.model.loss, self.passes.result(i), targets, self.split) / batch_size
        self.passes.backward(i, loss)
        # one of the devices with this loss reports it
        if all(self.mesh.place(self.tensor_rank)[digit] == 0 for digit in self.classes):
            self.total += loss.detach()

    def _split_classes(self) -> SplitClasses | None:
        """Return how the loss is computed if the classes are split over devices, else None."""
        if not self.classes:
            return None
        total = self.program.last.item.outputs
        return SplitClasses(mine(self.program.end.columns, total, self.by, self.device), total, self.classes, self.by)

    def _note(self, op: Op | None, start: TimePoint, end: TimePoint) -> None:
        """A pass, and after it a block for each algorithm of its collectives, as long as it held up this rank."""
        held, sizes = self.counter.take()
        self.bytes_sent += sizes
        self.collectives += self.counter.take_calls()
        phases, i = (PHASES[op.kind], op.micro_batch) if op else (("weights",), None)
        mine = self.plan.traffic[self.pipeline_rank] if self.plan.traffic else ()
        ops = [traffic_op(self.pipeline_rank, traffic, i) for traffic in mine if traffic.phase in phases]

        def add() -> None:
            seconds = [self.clock.total_s(held[one.part.partition("/")[0]]) for one in ops]
            at_s = self.clock.seconds(end) - sum(seconds)
            if op is not None:
                self.add_span(op, self.clock.seconds(start), at_s)
            for one, length_s in zip(ops, seconds, strict=True):
                self.add_span(one, at_s, at_s + length_s)
                at_s += length_s

        self.record_later(add)

    # -- one state for all engines ------------------------------------------------------------------------------------

    def gather_state(self, local_state: Callable[[], dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
        """Shards are put together in rank 0."""
        states: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
        dist.gather_object({"model": {}, "optimizer": {}} if self.replica else local_state(), states)
        if states is None:
            return {}
        model = {name: self._whole(name, [state["model"].get(name) for state in states]) for name in names}
        optimizer: dict[str, Any] = {}
        for name in self.parameter_names.values():
            kept = [state["optimizer"].get(name) for state in states]
            keys: dict[str, Any] = next((one for one in kept if one is not None), {})
            if keys:
                optimizer[name] = {key: self._whole(name, [one and one[key] for one in kept]) for key in keys}
        return {"model": model, "optimizer": optimizer, "step": self.steps}

    def _whole(self, name: str, blocks: Sequence[Any]) -> Any:
        """Join the blocks of all shards; they are those of the first stage that has the tensor."""
        first = next(n for n, block in enumerate(blocks) if block is not None)
        own = self._averaged(name, blocks[first : first + self.plan.mesh.tensor])
        shard = self._shard(name, own[0])
        return shard.whole(own, self.mesh) if shard else own[0]

    def _averaged(self, name: str, own: Sequence[Any]) -> Sequence[Any]:
        """Running statistics of local samples, averaged over the devices that have other samples."""
        digits = self.local.get(name)
        if not digits or not own[0].is_floating_point():
            return own
        groups = [self.mesh.group(rank, digits) for rank in range(len(own))]
        return [torch.stack([own[member] for member in group]).mean(0) for group in groups]

    def _shard(self, name: str, value: Any) -> Shard | None:
        """Return how a parameter, or its optimizer state, is sharded; None if it is not."""
        shard = self.shards.get(self.shared.get(name, name))
        cut = shard is not None and bool(shard.cuts)
        fits = shard is not None and isinstance(value, Tensor) and value.dim() == len(shard.shape)
        return shard if cut and fits else None

    def shard(self, name: str, own: Tensor) -> Any:
        shard = self._shard(name, own)
        return shard.blocks(own, self.mesh, self.tensor_rank) if shard else own

    def load_local_state(self, state: dict[str, Any]) -> None:
        def mine_of(name: str, value: Any) -> Any:
            if isinstance(value, Blocks):
                return value.own
            shard = self._shard(name, value)
            return shard.of(value, self.mesh, self.tensor_rank) if shard else value

        own = self.stage.state_dict().keys()
        self.stage.load_state_dict({name: mine_of(name, state["model"][name]) for name in own})
        saved = {
            name: {key: mine_of(name, value) for key, value in values.items()}
            for name, values in state["optimizer"].items()
        }
        load_optimizer_state(self.parameters, [self.optimizer], saved)


def _parted(ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """Splits ops into passes and messages before the all-reduce of gradients, and those after; passes trace
    collectives."""
    sums = next(
        number
        for number, op in enumerate(ops)
        if op.kind == "step" or (op.kind == "collective" and split_part(op.part) in REDUCING)
    )
    first, then = ([op for op in some if op.kind != "collective"] for some in (ops[:sums], ops[sums:]))
    return first, then
