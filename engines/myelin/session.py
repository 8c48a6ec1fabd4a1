"""A rank in training: one stage, driven by messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.myelin.config import Config
from engines.myelin.loop import Agenda, run
from engines.myelin.segments import SegmentedStage
from engines.myelin.spans import joined, together
from engines.myelin.transport import Arrival, Channel, Coming, Position, Transport
from engines.myelin.updates import Updates
from harness.checkpointing import segments
from harness.counting import ties
from harness.interfaces import Batch, Model, SessionSpec
from harness.op import Op
from harness.plan import Plan
from harness.profile import LayerProfile, ModelProfile, Skip
from harness.rank_passes import Passes
from harness.rank_session import RankSession
from harness.rank_ties import RankTies
from harness.schedule import LaneOps, Schedule
from harness.schedule.graph import COPIES
from harness.schedule.hops import plan_hops
from harness.simulate.assembly import sent_kind
from harness.skip import layer_skips, named_layers
from harness.trace import Span
from harness.training_state import model_state

HALF = ("float16", "bfloat16")


class MyelinSession(RankSession):
    def __init__(
        self, model: Model, plan: Plan, spec: SessionSpec, config: Config,
        schedule: Callable[[Plan, ModelProfile], Schedule],
    ) -> None:  # fmt: skip
        super().__init__(model, plan, spec)
        self.config, self.schedule = config, schedule

    def __exit__(self, *error: object) -> None:
        self.transport.close()

    def build(self, layers: nn.Sequential) -> None:
        plan, profile = self.plan, _profile(layers, self.spec.dtype)
        self.last = self.place == len(plan.stages) - 1
        self.stage = self._stage(layers).to(self.device)
        self.stage.autocast = self.autocast_dtype
        self.parameters = self.named(self.stage)
        self.ties = RankTies(layers, plan, self.rank, COPIES)
        tied = {copy.tie.name for copy in self.ties.own}
        group = self._replicas()
        self.updates = Updates(self.parameters, tied, self.spec, self.config, self.place, group, self.now, self.note)
        self.order = self.schedule(plan, profile)
        channels = [Channel(hop.source, hop.target, hop.part) for hop in plan_hops(plan, profile, portals=True)]
        channels += [channel.back for channel in channels]
        self.out = [channel for channel in channels if channel.source == self.place]
        self.transport = self._transport(channels)

    def _stage(self, layers: nn.Sequential) -> SegmentedStage:
        """This rank's layers; skips between others do not pass through it."""
        named, stage = named_layers(layers), self.plan.stages[self.place]
        own = range(stage.first, stage.last + 1)
        skips = [one for one in layer_skips(named) if one.source in own or one.target in own]
        spans = segments(stage, self.config.checkpoint_every, len(named))
        return SegmentedStage(self.place, named[stage.first : stage.last + 1], stage.first, skips, spans)

    def _replicas(self) -> dist.ProcessGroup | None:
        """The ranks with this stage; every rank opens the groups of all stages."""
        width, data = self.width, self.plan.mesh.data
        groups = [dist.new_group([r * width + j for r in range(data)]) for j in range(width)] if data > 1 else []
        return groups[self.place] if groups else None

    def _transport(self, channels: Sequence[Channel]) -> Transport:
        position = Position(self.rank, self.place, self.width, self.plan.mesh.data)
        if self.config.transport == "mpi":
            from engines.myelin.mpi_transport import MPITransport

            return MPITransport(position, channels, self.micro_batches, self.device)
        from engines.myelin.torch_transport import TorchTransport

        return TorchTransport(position, channels, self.micro_batches, self.device)

    # -- a step -------------------------------------------------------------------------------------------------------

    def train(self, batch: Batch, size: int) -> float:
        with self.at("between the passes of a step"):
            self.size, self.passes = size, Passes(self.stage)
            self.batches = dict(enumerate(self.pairs(batch)))
            self.coming = {i: Coming(i, len(inputs)) for i, (inputs, _) in self.batches.items()}
            self.total = torch.zeros((), dtype=torch.float64, device=self.device)
            self.updates.begin()
            self.transport.begin({channel: self._order_of(channel) for channel in self.transport.into})
            run(self._agenda(), self.transport, self._take, self._run)
            if self.ties.own:
                self.sent[self.ties.sums] += self.ties.sum_gradients(self.now, self.note)
            summed, self.skipped = self.updates.finish(), self.updates.skipped
            if self.plan.mesh.data > 1:
                self.sent["all_reduce"] += summed
            self.transport.finish()
        return float(self.total)

    def _lane(self, stage: int) -> LaneOps:
        return next(lane for lane in self.order.lanes if (lane.device, lane.queue) == (stage, "compute"))

    def _tasks(self, stage: int) -> list[Op]:
        return [op for op in self._lane(stage).ops if op.kind in ("F", "B")]

    def _agenda(self) -> Agenda:
        into = sum(channel.forward for channel in self.transport.into)
        back = len(self.transport.into) - into
        return Agenda(self.place, self._tasks(self.place), into, back, self._lane(self.place).rule, self.order.limit)

    def _order_of(self, channel: Channel) -> list[Coming]:
        """What comes in on a channel, in the order in which its sender runs it."""
        kind = "F" if channel.forward else "B"
        return [self.coming[op.micro_batch or 0] for op in self._tasks(channel.source) if op.kind == kind]

    def _take(self, arrival: Arrival) -> None:
        channel, i = arrival.channel, arrival.micro_batch
        self.passes.arrived(i, channel.part, arrival.tensors, channel.forward)
        self.note(channel.op(i), arrival.at_s, arrival.at_s)

    def _run(self, op: Op) -> None:
        """A pass, and the messages that it makes."""
        i = op.micro_batch or 0
        phase = "forward" if op.forward else "backward"
        with self.at(f"in the {phase} pass of micro-batch {self.number(i)}"):
            began = self.now()
            if op.forward:
                self._forward(i)
            else:
                self._backward(i)
            self.note(op, began, self.now())
            for channel in self.out:
                if channel.forward == op.forward:
                    self._send(channel, i)

    def _forward(self, i: int) -> None:
        self.stage.at(self.spec.seed, self.steps, self.number(i))
        self.passes.forward(i, self.batches[i][0].to(self.device) if self.place == 0 else None)

    def _backward(self, i: int) -> None:
        _, targets = self.batches.pop(i)
        if not self.last:
            self.passes.backward(i, None)
            return
        output = self.passes.outputs[i][""][0]
        if self.spec.dtype in HALF:
            output = output.float()  # sums over samples and the scale go beyond the numbers of float16
        loss = self.model.loss(output, targets.to(self.device)) / self.size
        del output
        self.total += loss.detach()
        self.passes.backward(i, loss * self.updates.scale)

    def _send(self, channel: Channel, i: int) -> None:
        tensors = self.passes.leaving(i, channel.part, channel.forward)
        began = self.now()
        size = self.transport.send(channel, self.coming[i], tensors)
        op = channel.op(i, size)
        self.note(op, began, began)
        self.sent[sent_kind(op, self.plan.devices) or ""] += size

    def merged(self, replicas: Sequence[list[Span]]) -> list[Span]:
        """Messages from when they were sent, as one rank saw, to when they had arrived, as the other did."""
        return joined(together(replicas))

    # -- state --------------------------------------------------------------------------------------------------------

    def held(self) -> list[Tensor]:
        return [*self.stage.buffers(), *self.updates.held()]

    def local_state(self) -> dict[str, Any]:
        weights, model = self.updates.weights(), model_state(self.stage)
        for name, parameter in self.stage.named_parameters(remove_duplicate=False):
            model[name] = weights[self.first_names[parameter]]
        return {"model": model, "optimizer": self.updates.state()}

    def state_dict(self) -> dict[str, Any]:
        """In float16 with the scale of the loss, too."""
        found, scaling = super().state_dict(), self.updates.scaling
        return found | {"loss_scale": scaling.state()} if found and scaling else found

    def load_local(self, state: dict[str, Any]) -> None:
        self.stage.load_state_dict({name: state["model"][name] for name in self.stage.state_dict()})
        self.updates.load(state["model"], state["optimizer"], state.get("loss_scale"))


def _profile(layers: nn.Sequential, dtype: str) -> ModelProfile:
    """Of the model as it is here, without times: what the order of the tasks follows from."""
    named, shared = named_layers(layers), ties(layers)
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for _, layer in named]
    profiles = [
        LayerProfile(name, param_bytes=size, tied=shared.get(name, ()))
        for (name, _), size in zip(named, sizes, strict=True)
    ]
    skips = tuple(Skip(one.source, one.target, 0, one.name) for one in layer_skips(named))
    return ModelProfile(tuple(profiles), skips=skips, dtype=dtype)
