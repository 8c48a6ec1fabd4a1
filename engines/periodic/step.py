"""A step: what the queues do for each op of the schedule, with one slot of tensors for each task.

    slot (j, i)    ins --stage j--> outs           forward of micro-batch i; a copy brings ins from another device
                   grads_in <------ grads_out      backward

The tensors travel in slots. A task's own graph is cut by detach, so that it runs on its device's queue, forward and
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engines.periodic.device_queues import DeviceQueues
from engines.periodic.versioned_stage import VersionedStage
from harness.core.error_notes import StageNote
from harness.core.op import Op
from harness.interfaces import Batch, Model
from harness.nn.skip import named_layers
from harness.runtime.autograd import failing_layer
from harness.runtime.cpu_streams import Job, Run
from harness.runtime.values import placed, split, tensors_of
from harness.schedule import Schedule

Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False)
class Slot:
    """The tensors of a task. `leaves` are where its graph begins, `edges` where it ends."""

    ins: tuple[Tensor, ...] = ()
    leaves: tuple[Tensor, ...] = ()
    edges: tuple[GradientEdge | None, ...] = ()
    outs: tuple[Tensor, ...] = ()
    grads_out: Gradients = ()
    grads_in: Gradients = ()


class Program:
    """A schedule, with what is the same in every step: which op waits for which, and which message each task sends."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.before = schedule.dependencies()
        self.sent = {
            Op(op.peer, "F" if op.forward else "B", op.micro_batch): op
            for op in self.before
            if op.kind == "copy" and op.peer is not None
        }


class Step(Run):
    """A batch in `micro_batches`, of which `every` make an update. `key` is seed and step, for dropout; `updates` have
    been made before the step."""

    def __init__(
        self,
        stages: Sequence[VersionedStage],
        queues: DeviceQueues,
        model: Model,
        batch: Batch,
        micro_batches: int,
        every: int,
        key: tuple[int, int],
        updates: int,
    ) -> None:
        super().__init__()
        self.stages, self.queues, self.model = stages, queues, model
        self.last = len(stages) - 1
        self.every, self.key, self.updates, self.size = every, key, updates, len(batch)
        self.inputs = split(batch.inputs, micro_batches)
        self.targets = split(batch.targets, micro_batches)
        self.losses: dict[int, Tensor] = {}
        self.slots = {(j, i): Slot() for j in range(len(stages)) for i in range(micro_batches)}
        self.bytes_sent = {"activations": 0, "gradients": 0}  # skips with them

    def execute(self, program: Program) -> None:
        """Run all ops, each queue in its order, and wait for them; raises the first error of any.

        Once an op has failed the others are skipped.
        """
        self.places = devices = program.schedule.devices
        jobs = {op: Job(self, self._work(op), op) for op in program.before}
        for op, before in program.before.items():
            jobs[op].after = [jobs[earlier] for earlier in before]
        for device, stage in zip(devices, self.stages, strict=True):
            self.queues.compute[device].submit(Job(self, partial(stage.begin, self.updates)))
        for queue in program.schedule.queues:
            for op in queue.ops if queue.name == "compute" else ():
                self.queues.compute[queue.device].submit(jobs[op])
                if message := program.sent.get(op):
                    self.queues.links[queue.device, devices[message.stage]].submit(jobs[message])
        for job in jobs.values():
            job.wait()
        self.raise_error()

    def loss(self) -> float:
        """Return the loss of the whole batch; the recorded losses are shares of a group of micro-batches."""
        shares = (self._samples(i // self.every) / self.size for i in range(len(self.inputs)))
        losses: list[float] = torch.stack([self.losses[i] for i in range(len(self.inputs))]).tolist()
        return sum(loss * share for loss, share in zip(losses, shares, strict=True))

    def _work(self, op: Op) -> Callable[[], None]:
        i = op.micro_batch
        assert i is not None
        if op.kind == "copy":
            return partial(self._move if op.forward else self._move_back, op.stage, i)
        return partial({"F": self._forward, "B": self._backward, "step": self._update}[op.kind], op.stage, i)

    def _forward(self, j: int, i: int) -> None:
        slot, stage = self.slots[j, i], self.stages[j]
        if j == 0:
            leaves = tensors_of(placed(self.inputs[i], stage.device))
        else:
            before = self.slots[j - 1, i]
            ins = slot.ins or before.outs  # neighbours on one device hand over what they have
            slot.ins = before.outs = ()
            leaves = self.stages[j].module(i).leaves(ins)
        outs = self._run(j, i, leaves)
        slot.leaves = leaves if not j or "" not in stage.module(i).ungraded_in else ()
        slot.edges = tuple(get_gradient_edge(out) if out.requires_grad else None for out in outs)
        outs = tuple(out.detach() for out in outs)
        if j < self.last:
            slot.outs = outs
        else:
            slot.grads_out = (torch.ones_like(outs[0]),)
            self.losses[i] = outs[0]

    def _run(self, j: int, i: int, leaves: tuple[Tensor, ...], again: bool = False) -> tuple[Tensor, ...]:
        """Run a task and return the stage's outputs; the last stage returns its share of the group's loss."""
        stage = self.stages[j]
        module = stage.module(i) if again else stage.forward_module(i)
        module.at(*self.key, i, again)
        out = module(*leaves)
        if j < self.last:
            return out if isinstance(out, tuple) else (out,)
        with _noted(f"in stage {j}, the loss, micro-batch {i}"):
            return (
                self.model.loss(out, placed(self.targets[i], tensors_of(out)[0].device))
                / self._samples(i // self.every),
            )

    def _backward(self, j: int, i: int) -> None:
        slot = self.slots[j, i]
        if not self.stages[j].module(i).has_backward:
            slot.edges = ()
            return
        if j < self.last and not slot.grads_out:
            slot.grads_out, self.slots[j + 1, i].grads_in = self.slots[j + 1, i].grads_in, ()
        pairs = [(e, g) for e, g in zip(slot.edges, slot.grads_out, strict=True) if e is not None and g is not None]
        try:
            with self.stages[j].backward(i) if pairs else nullcontext():
                torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        except Exception as error:
            if not isinstance(error, MemoryError | torch.OutOfMemoryError):
                layer = self._failing_layer(j, i)
                error.add_note(StageNote(f"in stage {j}, layer {layer!r}, micro-batch {i}, backward"))
            raise
        slot.grads_in = tuple(leaf.grad for leaf in slot.leaves) if j else ()
        slot.leaves, slot.edges, slot.grads_out = (), (), ()

    def _failing_layer(self, j: int, i: int) -> str:
        """Do the forward task again, to see in which layer the backward pass fails. Where what arrived is not kept, as
        no gradient of it is needed, nobody knows."""
        slot = self.slots[j, i]
        if not slot.leaves:
            return "unknown"

        def run_again() -> Iterable[tuple[Tensor, Tensor | None]]:
            return zip(self._run(j, i, slot.leaves, again=True), slot.grads_out, strict=True)

        return failing_layer(named_layers(self.stages[j].module(i)), run_again, slot.leaves)

    def _update(self, j: int, i: int) -> None:
        with _noted(f"in stage {j}, the optimizer, after micro-batch {i}"):
            self.stages[j].update(i // self.every)

    def _move(self, j: int, i: int) -> None:
        """Bring to stage j what the stage before it has made."""
        source = self.slots[j - 1, i]
        outs, source.outs = source.outs, ()
        with _noted(f"from stage {j - 1} to stage {j}, micro-batch {i}"):
            self.slots[j, i].ins = tuple(one for one in self._copied(outs, j - 1, j) if one is not None)
        self._count("activations", outs)

    def _move_back(self, j: int, i: int) -> None:
        """Bring to stage j the gradients that the stage after it has made."""
        source = self.slots[j + 1, i]
        gradients, source.grads_in = source.grads_in, ()
        with _noted(f"from stage {j + 1} to stage {j}, micro-batch {i}"):
            self.slots[j, i].grads_out = self._copied(gradients, j + 1, j)
        self._count("gradients", gradients)

    def _copied(self, tensors: Gradients, source: int, target: int) -> Gradients:
        """Copy what a stage has made to the device of another one."""
        device = self.stages[target].device
        copied = tuple(
            None if tensor is None else tensor.to(device, copy=True, non_blocking=True) for tensor in tensors
        )
        self.queues.copied(tensors, copied, self.places[source], self.places[target])
        return copied

    def _count(self, kind: str, sent: Gradients) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in sent if tensor is not None)
        with self.lock:
            self.bytes_sent[kind] += size

    def _samples(self, group: int) -> int:
        return sum(len(tensors_of(one)[0]) for one in self.targets[group * self.every : (group + 1) * self.every])


@contextmanager
def _noted(where: str) -> Iterator[None]:
    """An error inside says where it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(StageNote(where))
        raise
