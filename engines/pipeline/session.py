"""A rank's stages in training: it runs its tasks in their order, each when its messages have come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # optimizers import it, and part of it backward passes: once here, and not in each rank
from torch import Tensor, nn

from engines.pipeline.passes import Passes
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.trace import Span
from harness.interfaces import Batch, Model, SessionSpec
from harness.nn.skip import frozen_prefix, layer_skips, named_layers
from harness.runtime.session import place
from harness.runtime.stage_module import StageModule, stage_modules
from harness.runtime.stages_session import StagesSession
from harness.runtime.training_state import RandomNumbers, split_batch
from harness.runtime.transports.merge_spans import joined, together
from harness.runtime.transports.transport import Arrival, Channel, Coming, Position, Transport
from harness.runtime.values import placed
from harness.schedule import Schedule
from harness.schedule.transfers import StageSkip, transfers
from harness.simulator.lowering import sent_kind

if TYPE_CHECKING:
    from engines.pipeline.engine import Config

Message = tuple[Channel, int]
"""A channel and a micro-batch."""


class PipelineSession(StagesSession):
    def __init__(
        self,
        model: Model,
        plan: Plan,
        spec: SessionSpec,
        config: Config,
        order: Schedule,
    ) -> None:
        super().__init__(model, plan, spec)
        self.config, self.order = config, order.by_queue()

    def __exit__(self, *error: object) -> None:
        self.transport.close()

    def build(self, layers: nn.Sequential) -> None:
        super().build(layers)
        self.tasks = [self._tasks(device, layers) for device in range(self.ranks_per_replica)]
        own = self.tasks[self.pipeline_rank]
        self.split = {(op.stage, op.micro_batch) for op in own if op.kind == "W"}
        self.recomputed = {(op.stage, op.micro_batch) for op in own if op.kind == "R"}
        for module in self.modules:
            module.recomputes = any(stage == module.number for stage, _ in self.recomputed)
        self.channels = self._channels(layers)
        self.homes = [stage.device for stage in self.plan.stages]
        self.places = {(op.stage, op.kind, op.micro_batch): n for row in self.tasks for n, op in enumerate(row)}
        self.transport = self._transport([c for c in self.channels if self.homes[c.source] != self.homes[c.target]])
        self.facts |= self.transport.facts

    def make_modules(self, layers: nn.Sequential, numbers: Sequence[int]) -> list[StageModule]:
        return stage_modules(layers, self.plan, numbers, portals=True)

    def _tasks(self, device: int, layers: nn.Sequential) -> list[Op]:
        """Return the tasks of a device in their order; of a frozen stage nothing is recomputed."""
        prefix, stages = frozen_prefix(named_layers(layers)), self.plan.stages
        ops = (op for op in self.order[device, "compute"] if op.kind in ("F", "B", "W", "R"))
        return [op for op in ops if op.kind != "R" or stages[op.stage].last >= prefix]

    def _channels(self, layers: nn.Sequential) -> list[Channel]:
        """Return those between all stages, for each boundary and each skip, there and, but from a frozen prefix,
        back."""
        named, stage_of = named_layers(layers), self.plan.stage_of
        prefix, layer = frozen_prefix(named), {}
        skips = []
        for one in layer_skips(named):
            layer[one.name] = one.source
            if stage_of(one.source) != stage_of(one.target):
                skips.append(StageSkip(stage_of(one.source), stage_of(one.target), one.name))
        found = transfers([0] * (len(self.plan.stages) - 1), skips, portals=True)
        channels = [Channel(one.source, one.target, one.part) for one in found]
        made = [layer.get(channel.part, self.plan.stages[channel.source].last) for channel in channels]
        return [*channels, *(one.back for one, number in zip(channels, made, strict=True) if number >= prefix)]

    def _transport(self, channels: Sequence[Channel]) -> Transport:
        position = Position(self.rank, self.pipeline_rank, tuple(self.homes), self.plan.mesh.data)
        if self.config.transport == "mpi":
            from harness.runtime.transports.mpi_transport import MPITransport

            return MPITransport(position, channels, self.plan.micro_batches, self.device)
        from harness.runtime.transports.torch_transport import DirectTransport

        return DirectTransport(position, channels, self.plan.micro_batches, self.device)

    # -- a step -------------------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, batch_size: int) -> Tensor:
        with self.phase("between the passes of a step", waits=True):
            self.stage.zero_grad(set_to_none=True)
            self.batch_size = batch_size
            self.passes = {module.number: Passes(module) for module in self.modules}
            self.batches = dict(enumerate(split_batch(batch, self.plan.micro_batches)))
            self.coming = {i: Coming(i, len(part)) for i, part in self.batches.items()}
            self.total = torch.zeros((), dtype=torch.float64, device=self.device)
            self.random: dict[tuple[int, int], RandomNumbers] = {}
            self.here: set[Message] = set()
            self.undelivered: dict[int, list[tuple[int, Channel, int]]] = defaultdict(list)
            self.transport.begin({channel: self._order_of(channel) for channel in self.transport.into})
            for op in self.tasks[self.pipeline_rank]:
                self._wait_for(op)
                self._run(op)
            self.transport.finish()
            self.update()
        return self.total

    def _order_of(self, channel: Channel) -> list[Coming]:
        """Return the messages of a channel in the order in which its sender runs them."""
        kind = "F" if channel.forward else "B"
        tasks = self.tasks[self.homes[channel.source]]
        return [self.coming[op.micro_batch or 0] for op in tasks if op.kind == kind and op.stage == channel.source]

    def _wait_for(self, op: Op) -> None:
        """Take messages until those of a task are here; what stays on this device is here already."""
        if op.kind not in ("F", "B"):
            return
        needed = {
            (channel, op.micro_batch)
            for channel in self.transport.into
            if channel.target == op.stage and channel.forward == op.forward
        }
        for message in needed:
            while message not in self.here:
                self._take(message[0])
        self.here -= needed

    def _take(self, channel: Channel) -> None:
        """Take the next message of a channel."""
        for arrival in self.transport.receive(channel):
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        channel, i = arrival.channel, arrival.micro_batch
        self.passes[channel.target].arrived(i, channel.part, arrival.tensors, channel.forward)
        self.here.add((channel, i))
        if arrival.at_s is not None:
            self.record(channel.op(i), arrival.at_s, arrival.at_s)
        self._forget(self.homes[channel.source], self._place(channel.source, channel.forward, i))

    def _run(self, op: Op) -> None:
        """A pass, and the messages that it makes."""
        stage, i = op.stage, op.micro_batch or 0
        with self.phase(place(op.kind, self.global_micro_batch(i)), stage=stage):
            began = self.now()
            if op.kind == "F":
                self._forward(stage, i)
            elif op.kind == "R":
                self._use(stage, i, again=True)
                with self.random.pop((stage, i)).again():
                    self.passes[stage].recompute(i, self._entering(stage, i))
            elif not self.passes[stage].stage.has_backward:
                self._until_used(stage, i)
            elif op.kind == "W":
                self.passes[stage].backward_weights(i)
            elif (stage, op.micro_batch) in self.split:
                self.passes[stage].backward_inputs(i, self._loss(stage, i))
            else:
                self.passes[stage].backward(i, self._loss(stage, i))
            self.record(op, began, self.now())
            if op.kind in ("F", "B"):
                self._leave(stage, i, op.forward)

    def _forward(self, stage: int, i: int) -> None:
        self._use(stage, i)
        passes, entering = self.passes[stage], self._entering(stage, i)
        if (stage, i) in self.recomputed:
            self.random[stage, i] = RandomNumbers(self.device)
            passes.forward_without_graph(i, entering)
        else:
            passes.forward(i, entering)

    def _use(self, stage: int, i: int, again: bool = False) -> None:
        """The stage runs this micro-batch next."""
        self.passes[stage].stage.at(self.spec.seed, self.steps, self.global_micro_batch(i), again)

    def _entering(self, stage: int, i: int) -> Any:
        return placed(self.batches[i].inputs, self.device) if stage == 0 else None

    def _loss(self, stage: int, i: int) -> Tensor | None:
        """Return the loss in the last stage."""
        if stage != len(self.plan.stages) - 1:
            return None
        targets = placed(self.batches[i].targets, self.device)
        loss = self.model.loss(self.passes[stage].result(i), targets) / self.batch_size
        self.total += loss.detach()
        return loss

    def _leave(self, stage: int, i: int, forward: bool) -> None:
        """Send what a pass has made; another stage of this device gets it as it is, as its own layers would."""
        for channel in self.channels:
            if channel.source != stage or channel.forward != forward:
                continue
            tensors = self.passes[stage].leaving(i, channel.part, forward)
            if channel.target in self.passes:
                self.passes[channel.target].arrived(i, channel.part, tensors, forward)
                continue
            began = self.now()
            size = self.transport.send(channel, self.coming[i], tensors)
            op = channel.op(i, size)
            self.record(op, began, began)
            self.bytes_sent[sent_kind(op, self.homes) or ""] += size
            used = self._place(channel.target, forward, i)
            self.undelivered[self.homes[channel.target]].append((used, channel, i))

    def _until_used(self, stage: int, i: int) -> None:
        """In place of a backward pass of a frozen stage: wait until what the forward pass has sent is received. So no
        more of it waits here than the order has micro-batches in flight."""
        for device, sent in self.undelivered.items():
            for _, channel, number in [one for one in sent if one[1].source == stage and one[2] == i]:
                self.transport.delivered(channel, number)
            self.undelivered[device] = [one for one in sent if one[1].source != stage or one[2] != i]

    def _forget(self, device: int, place: int) -> None:
        """A device has come to this place of its order: it has used what it needed before."""
        sent = self.undelivered[device]
        for _, channel, i in [one for one in sent if one[0] < place]:
            self.transport.delivered(channel, i)
        self.undelivered[device] = [one for one in sent if one[0] >= place]

    def _place(self, stage: int, forward: bool, i: int) -> int:
        """Return the place of a pass in its device's order."""
        return self.places[stage, "F" if forward else "B", i]

    def merge_spans(self, replicas: Sequence[list[Span]]) -> list[Span]:
        """Messages from when they were sent, as one rank saw, to when they had arrived, as the other did."""
        return joined(together(replicas), self.homes)
