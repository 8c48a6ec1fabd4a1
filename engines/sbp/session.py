"""A rank in training: its blocks of every layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.sbp.agreement import agreed
from engines.sbp.config import Config
from engines.sbp.exchange import Exchanger, Groups
from engines.sbp.gradients import Gradients
from engines.sbp.layout import Dim, Mesh
from engines.sbp.loss import SplitClasses, split_loss
from engines.sbp.modules import mine
from engines.sbp.neighbours import Neighbours
from engines.sbp.program import program
from engines.sbp.shards import Shard
from engines.sbp.split import Splitter
from harness.counting import count
from harness.interfaces import Batch, Model, SessionSpec
from harness.op import Op
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.rank_passes import Passes
from harness.rank_session import Mark, RankSession
from harness.rank_ties import RankTies
from harness.sbp.chain import chain_of
from harness.sbp.planned import OUTPUT, grid_of_plan
from harness.schedule import Schedule
from harness.schedule.graph import REDUCING, split_part
from harness.schedule.tensor import PHASES, told
from harness.simulate.assembly import sent_kind
from harness.stage_module import stage_modules
from harness.tally import Tally
from harness.training_state import (
    load_optimizer_state,
    make_optimizer,
    model_state,
    optimizer_state,
    optimizer_tensors,
)

SAMPLES = 2
"""Of the micro-batch on the meta device that shows in which order modules run."""


class SBPSession(RankSession):
    def __init__(
        self, model: Model, plan: Plan, spec: SessionSpec, config: Config,
        schedule: Callable[[Plan, ModelProfile], Schedule],
    ) -> None:  # fmt: skip
        super().__init__(model, plan, spec)
        self.config = config
        self.ran: list[str] = []
        profile = count(model, SAMPLES, spec.dtype, spec.autocast, self.ran.append)
        self.lanes = schedule(plan, profile).by_lane()
        self.mesh = Mesh(grid_of_plan(plan))
        self.program = program(plan, chain_of(profile), self.mesh)

    def build(self, layers: nn.Sequential) -> None:
        agreed(self.plan)
        self.tally = Tally()
        groups = Groups(self.mesh, self.rank - self.shard, self.shard)
        self.by = Exchanger(self.mesh, groups, self.tally, self.config.aligned)
        splitter = Splitter(layers, self.program, self.by)
        splitter.split(self.ran)
        self.shards: dict[str, Shard] = splitter.shards
        layers.to(self.device)
        ranks = dist.get_world_size()
        digits = self.program.groups | splitter.norms | ({self.classes} if self.classes else set())
        groups.make("activations", digits, ranks)
        groups.make("gradients", Gradients.wanted(self.shards), ranks)
        self.first_names = {parameter: name for name, parameter in layers.named_parameters()}
        every = layers.named_parameters(remove_duplicate=False)
        self.shared = {name: self.first_names[parameter] for name, parameter in every}
        self.stage = stage_modules(layers, self.plan, [self.place])[0].to(self.device)
        self.parameters = self.named(self.stage)
        self.gradients = Gradients(self.parameters, self.shards, self.mesh, groups, self.tally, self.config)
        self.ties = RankTies(layers, self.plan, self.rank)
        self.optimizer = make_optimizer(self.parameters.values(), self.spec.optimizer)
        self.split = self._split_classes()
        self.ops, self.behind = _parted(self.lanes[self.place, "compute"])
        self.neighbours = Neighbours(self.rank, self.place, self.plan.mesh.tensor, self.device)

    @property
    def classes(self) -> tuple[int, ...]:
        """The digits that split the output's features."""
        return tuple(sorted(self.program.end.columns.split))

    def share(self, batch: Batch) -> Batch:
        """This rank's block of the replica's samples, micro-batch by micro-batch: all that its device needs of them."""
        whole, start, end = super().share(batch), self.program.start, self.program.end
        inputs = self._rows(whole.inputs, start.rows)
        if start.columns.split:
            inputs = inputs.index_select(1, mine(start.columns, inputs.shape[1], self.by, inputs.device))
        return Batch(inputs, self._rows(whole.targets, end.rows))

    def _rows(self, tensor: Tensor, dim: Dim) -> Tensor:
        if not dim.split:
            return tensor
        parts = tensor.tensor_split(self.micro_batches)
        return torch.cat([one.index_select(0, mine(dim, len(one), self.by, one.device)) for one in parts])

    def entering(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs and the targets of each micro-batch."""
        wanted = OUTPUT in self.plan.layouts and batch.inputs.is_floating_point()
        for inputs, targets in self.pairs(batch):
            inputs = inputs.to(self.device)
            # the gradient of the input is a part of what is planned
            yield inputs.requires_grad_() if wanted else inputs, targets.to(self.device)

    def train(self, batch: Batch, size: int) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        self.passes = Passes(self.stage)
        self.batches, self.total = dict(enumerate(self.entering(batch))), 0.0
        for op in self.ops:
            self._run(op, size)
        self._sum_gradients()
        for op in self.behind:
            self._run(op, size)
        return self.total

    def _sum_gradients(self) -> None:
        """All sums of gradients: of weights and of what is small, then over the stages that share a parameter."""
        began = self.now()
        self.gradients.finish()
        self._note(None, began, self.now())
        self.sent[self.ties.sums] += self.ties.sum_gradients(self.now, self.note)

    def _run(self, op: Op, size: int) -> None:
        began = self.now()
        if op.kind == "F":
            self._forward(op)
        elif op.kind == "B":
            self._backward(op, size)
        elif op.kind == "step":
            self.optimizer.step()
        else:
            sent, kind = self._message(op), sent_kind(op, self.plan.devices)
            if kind:
                self.sent[kind] += sent
        if op.kind in ("F", "B"):
            self._note(op, began, self.now())
        else:
            self.note(op, began, self.now())

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
        self.stage.at(self.spec.seed, self.steps, self.number(i))
        with self.autocast():
            self.passes.forward(i, self.batches[i][0] if self.place == 0 else None)

    def _backward(self, op: Op, size: int) -> None:
        assert op.micro_batch is not None
        i = op.micro_batch
        self.gradients.last = i == self.micro_batches - 1
        _, targets = self.batches.pop(i)
        if self.place < len(self.plan.stages) - 1:
            self.passes.backward(i, None)
            return
        output = self.passes.outputs[i][""][0]
        loss = split_loss(self.model.loss, output, targets, self.split) / size
        del output
        self.passes.backward(i, loss)
        shown = all(self.mesh.place(self.shard)[digit] == 0 for digit in self.classes)  # one of those with this loss
        self.total += float(loss.detach()) if shown else 0.0

    def _split_classes(self) -> SplitClasses | None:
        """How the loss is computed where classes lie on several devices."""
        if not self.classes:
            return None
        total = self.program.last.item.outputs
        return SplitClasses(mine(self.program.end.columns, total, self.by, self.device), total, self.classes, self.by)

    def _note(self, op: Op | None, start: Mark, end: Mark) -> None:
        """A pass, and behind it a block for each algorithm of its collectives, as long as it held up this rank."""
        seconds, sizes = self.tally.take()
        self.sent += Counter(sizes)
        phases, i = (PHASES[op.kind], op.micro_batch) if op else (("weights",), None)
        mine = self.plan.traffic[self.place] if self.plan.traffic else ()
        ops = [told(self.place, one, i) for one in mine if one.phase in phases]
        timed = isinstance(start, float) and isinstance(end, float)  # on a GPU they run beside the layers
        held = [seconds[one.part.partition("/")[0]] if timed else 0.0 for one in ops]
        at = end - sum(held) if isinstance(end, float) else end
        if op is not None:
            self.note(op, start, at)
        for one, length in zip(ops, held, strict=True):
            following = at + length if isinstance(at, float) else at
            self.note(one, at, following)
            at = following

    def held(self) -> list[Tensor]:
        return [*self.stage.parameters(), *self.stage.buffers(), *optimizer_tensors([self.optimizer])]

    # -- one state for all engines ------------------------------------------------------------------------------------

    def local_state(self) -> dict[str, Any]:
        return {"model": model_state(self.stage), "optimizer": optimizer_state(self.parameters, [self.optimizer])}

    def state_dict(self) -> dict[str, Any]:
        """Shards are put together in rank 0."""
        states: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
        dist.gather_object(self.local_state(), states)
        if states is None:
            return {}
        model = {name: self._whole(name, [state["model"].get(name) for state in states]) for name in self.names}
        optimizer: dict[str, Any] = {}
        for name in self.first_names.values():
            kept = [state["optimizer"].get(name) for state in states]
            keys: dict[str, Any] = next((one for one in kept if one is not None), {})
            if keys:
                optimizer[name] = {key: self._whole(name, [one and one[key] for one in kept]) for key in keys}
        return {"model": model, "optimizer": optimizer, "step": self.steps}

    def _whole(self, name: str, blocks: Sequence[Any]) -> Any:
        """From the blocks of the first stage that has it, those of all its shards."""
        first = next(n for n, block in enumerate(blocks) if block is not None)
        own = blocks[first : first + self.plan.mesh.tensor]
        shard = self._shard(name, own[0])
        return shard.whole(own, self.mesh) if shard else own[0]

    def _shard(self, name: str, value: Any) -> Shard | None:
        """How a parameter, or the optimizer's state of it, is cut, if it is."""
        shard = self.shards.get(self.shared.get(name, name))
        cut = shard is not None and bool(shard.cuts)
        fits = shard is not None and isinstance(value, Tensor) and value.dim() == len(shard.shape)
        return shard if cut and fits else None

    def load_local(self, state: dict[str, Any]) -> None:
        def mine_of(name: str, value: Any) -> Any:
            shard = self._shard(name, value)
            return shard.of(value, self.mesh, self.shard) if shard else value

        own = self.stage.state_dict().keys()
        self.stage.load_state_dict({name: mine_of(name, state["model"][name]) for name in own})
        saved = {
            name: {key: mine_of(name, value) for key, value in values.items()}
            for name, values in state["optimizer"].items()
        }
        load_optimizer_state(self.parameters, [self.optimizer], saved)


def _parted(ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """Passes and messages before the sums of gradients, and what comes behind these; collectives are told by passes."""
    sums = next(
        number for number, op in enumerate(ops)
        if op.kind == "step" or (op.kind == "collective" and split_part(op.part) in REDUCING)
    )  # fmt: skip
    first, then = ([op for op in some if op.kind != "collective"] for some in (ops[:sums], ops[sums:]))
    return first, then
