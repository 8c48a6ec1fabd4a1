"""A rank in training: one stage, driven by messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # backward passes import it: once here, and not in each rank
from torch import Tensor, nn

from engines.myelin.checkpointed_stage import SegmentedStage
from engines.myelin.optimizer_step import OptimizerStep
from engines.myelin.scheduler import ReadyTasks, run
from harness.core.activation_checkpointing import segments
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.trace import Span
from harness.interfaces import Batch, Model, SessionSpec
from harness.nn.skip import frozen_prefix, layer_skips, named_layers
from harness.nn.tied import moved, tensor_bytes, ties
from harness.runtime.distributed_session import DistributedSession
from harness.runtime.stage_passes import StagePasses
from harness.runtime.training_state import split_batch
from harness.runtime.transports.merge_spans import joined, together
from harness.runtime.transports.transport import Arrival, Channel, Coming, Position, Transport
from harness.runtime.values import mapped, placed
from harness.schedule import QueueOps, Schedule
from harness.schedule.dependency_graph import COPIES
from harness.schedule.transfers import plan_transfers
from harness.simulator.lowering import sent_kind

if TYPE_CHECKING:
    from engines.myelin.engine import Config

HALF = ("float16", "bfloat16")


class MyelinSession(DistributedSession):
    stage: SegmentedStage

    def __init__(
        self,
        model: Model,
        plan: Plan,
        spec: SessionSpec,
        config: Config,
        schedule: Callable[[Plan, ModelProfile], Schedule],
    ) -> None:
        super().__init__(model, plan, spec)
        self.config, self.schedule = config, schedule

    def __exit__(self, *error: object) -> None:
        self.transport.close()

    def build(self, layers: nn.Sequential) -> None:
        plan, profile = self.plan, _profile(layers, self.spec.dtype)
        self.last = self.pipeline_rank == len(plan.stages) - 1
        self.stage = moved(self._stage(layers), self.device)
        self.stage.autocast = self.autocast_dtype
        self.parameters = {name: one for name, one in self.named_parameters().items() if one.requires_grad}
        self.tie_weights(layers, COPIES)
        tied = {copy.tie.name for copy in self.tied.copies}
        group = self.replica_group()
        self.updates = OptimizerStep(
            self.parameters, tied, self.spec, self.config, self.pipeline_rank, group, self.now, self.record
        )
        self.order = self.schedule(plan, profile)
        channels = self._channels(profile)
        self.out = [channel for channel in channels if channel.source == self.pipeline_rank]
        self.transport = self._transport(channels)
        self.facts |= self.transport.facts

    def _stage(self, whole: nn.Sequential) -> SegmentedStage:
        """Build this rank's stage; skips between other stages do not pass through it."""
        named, stage = named_layers(whole), self.plan.stages[self.pipeline_rank]
        own = range(stage.first, stage.last + 1)
        skips = [one for one in layer_skips(named) if one.source in own or one.target in own]
        spans = segments(stage, self.config.checkpoint_every, len(named))
        layers, prefix = named[stage.first : stage.last + 1], frozen_prefix(named)
        return SegmentedStage(self.pipeline_rank, layers, stage.first, skips, spans, prefix)

    def _channels(self, profile: ModelProfile) -> list[Channel]:
        """Return those between all stages, there and, but from a frozen prefix, back."""
        made = {skip.name: skip.source for skip in profile.skips}
        there = [Channel(one.source, one.target, one.part) for one in plan_transfers(self.plan, profile, portals=True)]
        stages, prefix = self.plan.stages, profile.frozen_prefix
        return [*there, *(one.back for one in there if made.get(one.part, stages[one.source].last) >= prefix)]

    def _transport(self, channels: Sequence[Channel]) -> Transport:
        position = Position(self.rank, self.pipeline_rank, tuple(range(self.ranks_per_replica)), self.plan.mesh.data)
        if self.config.transport == "mpi":
            from harness.runtime.transports.mpi_transport import MPITransport

            return MPITransport(position, channels, self.plan.micro_batches, self.device)
        from harness.runtime.transports.torch_transport import TorchTransport

        return TorchTransport(position, channels, self.plan.micro_batches, self.device)

    # -- a step -------------------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, batch_size: int) -> Tensor:
        with self.phase("between the passes of a step", waits=True):
            self.batch_size, self.passes = batch_size, StagePasses(self.stage)
            self.batches = dict(enumerate(split_batch(batch, self.plan.micro_batches)))
            self.coming = {i: Coming(i, len(part)) for i, part in self.batches.items()}
            self.total = torch.zeros((), dtype=torch.float64, device=self.device)
            self.updates.begin()
            self.transport.begin({channel: self._order_of(channel) for channel in self.transport.into})
            run(self._ready_tasks(), self.transport, self._take, self._run)
            if self.config.barrier:
                dist.barrier()
            self.sum_tied_gradients()
            summed, self.skipped = self.updates.finish(), self.updates.skipped
            if self.plan.mesh.data > 1:
                self.bytes_sent["all_reduce"] += summed
            self.transport.finish()
        return self.total

    def _queue(self, stage: int) -> QueueOps:
        return next(queue for queue in self.order.queues if (queue.device, queue.name) == (stage, "compute"))

    def _tasks(self, stage: int) -> list[Op]:
        return [op for op in self._queue(stage).ops if op.kind in ("F", "B")]

    def _ready_tasks(self) -> ReadyTasks:
        into = sum(channel.forward for channel in self.transport.into)
        back, stage = len(self.transport.into) - into, self.pipeline_rank
        return ReadyTasks(self._tasks(stage), into, back, self._queue(stage).rule)

    def _order_of(self, channel: Channel) -> list[Coming]:
        """Return the messages of a channel in the order in which its sender runs them."""
        kind = "F" if channel.forward else "B"
        return [self.coming[op.micro_batch or 0] for op in self._tasks(channel.source) if op.kind == kind]

    def _take(self, arrival: Arrival) -> None:
        channel, i = arrival.channel, arrival.micro_batch
        self.passes.arrived(i, channel.part, arrival.tensors, channel.forward)
        assert arrival.at_s is not None
        self.record(channel.op(i), arrival.at_s, arrival.at_s)

    def _run(self, op: Op) -> None:
        """A pass, and the messages that it makes."""
        i = op.micro_batch or 0
        phase = "forward" if op.forward else "backward"
        with self.phase(f"in the {phase} pass of micro-batch {self.global_micro_batch(i)}"):
            began = self.now()
            if op.forward:
                self._forward(i)
            else:
                self._backward(i)
            self.record(op, began, self.now())
            for channel in self.out:
                if channel.forward == op.forward:
                    self._send(channel, i)

    def _forward(self, i: int) -> None:
        self.use_micro_batch(i)
        self.passes.forward(i, placed(self.batches[i].inputs, self.device) if self.pipeline_rank == 0 else None)

    def _backward(self, i: int) -> None:
        targets = self.batches.pop(i).targets
        if not self.last:
            self.passes.backward(i, None)
            return
        given = self.passes.result(i)
        if self.spec.dtype in HALF:  # sums over samples and the scale go beyond the numbers of float16
            given = mapped(lambda output: output.float() if output.is_floating_point() else output, given)
        loss = self.model.loss(given, placed(targets, self.device)) / self.batch_size
        del given
        self.total += loss.detach()
        self.passes.backward(i, loss * self.updates.scale)

    def _send(self, channel: Channel, i: int) -> None:
        tensors = self.passes.leaving(i, channel.part, channel.forward)
        began = self.now()
        size = self.transport.send(channel, self.coming[i], tensors)
        op = channel.op(i, size)
        self.record(op, began, began)
        self.bytes_sent[sent_kind(op, self.plan.devices) or ""] += size

    def merge_spans(self, replicas: Sequence[list[Span]]) -> list[Span]:
        """Messages from when they were sent, as one rank saw, to when they had arrived, as the other did."""
        return joined(together(replicas), self.plan.devices)

    # -- state --------------------------------------------------------------------------------------------------------

    def held_tensors(self) -> list[Tensor]:
        frozen = [parameter for parameter in self.stage.parameters() if not parameter.requires_grad]
        return [*self.stage.buffers(), *frozen, *self.updates.held()]

    def own_tensors(self) -> dict[str, Any]:
        """Return the weights that the optimizer updates, in float32 those of half precision, and what it keeps."""
        weights, model = self.updates.weights(), self.stage.state_dict()
        for name, parameter in self.stage.named_parameters(remove_duplicate=False):
            model[name] = weights.get(self.parameter_names[parameter], model[name])
        return {"model": model, "optimizer": self.updates.state()}

    def scale_state(self) -> dict[str, Any]:
        scaling = self.updates.scaling
        return {"loss_scale": scaling.state()} if scaling else {}

    def load_local_state(self, state: dict[str, Any]) -> None:
        self.stage.load_state_dict({name: state["model"][name] for name in self.stage.state_dict()})
        own = {first: name for first, name in self.names_here().items() if first in self.parameters}
        weights = {first: state["model"][name] for first, name in own.items()}
        self.updates.load(weights, state["optimizer"], state.get("loss_scale"))


def _profile(layers: nn.Sequential, dtype: str) -> ModelProfile:
    """Profile the model without times: the order of tasks follows from it."""
    named, shared = named_layers(layers), ties(layers)
    profiles = []
    for name, layer in named:
        sizes = {parameter: tensor_bytes(parameter) for parameter in layer.parameters()}
        frozen = [size for parameter, size in sizes.items() if not parameter.requires_grad]
        profiles.append(
            LayerProfile(
                name,
                param_bytes=sum(sizes.values()),
                weights=len(sizes),
                frozen_bytes=sum(frozen),
                frozen_weights=len(frozen),
                tied=shared.get(name, ()),
            )
        )
    skips = tuple(Skip(one.source, one.target, 0, one.name) for one in layer_skips(named))
    return ModelProfile(tuple(profiles), skips=skips, dtype=dtype)
