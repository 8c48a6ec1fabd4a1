"""The pipeline over CUDA devices: the autograd graph carries the tensors, as in the paper (torchgpipe, section 3).

Autograd has a thread for each CUDA device and its work is asynchronous, so the graph itself drives all devices.

    Task(i, j) --> Leave --> fork --> Copy --> Arrive --> join --> Task(i, j+1)
                             |  `--> Recompute --> phony for (i+1, j)
                             `-- the copy stream waits here forward; backward the compute stream waits for the
                                 gradient here, after the recomputation was issued: so the two overlap
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function

from engines.gpipe.cuda_checkpoint import CheckpointedTask, Recompute
from engines.gpipe.cuda_streams import Recorder, Streams, TimePoint
from engines.gpipe.dependency import WholeBackward, first_when_ready, fork, join
from engines.gpipe.microbatch import Parts, gather
from engines.gpipe.stage import Stage, Surroundings
from engines.gpipe.stage_layout import StageLayout
from engines.gpipe.tied_copies import SUMS, TiedCopies
from harness.core.op import Op, Queue
from harness.runtime.autograd import differentiable
from harness.runtime.values import Form, Value, distinct, mapped, tensors_of, together
from harness.schedule.builders.gpipe import clock_cycles, recomputed
from harness.schedule.transfers import Transfer

V = TypeVar("V", bound=Value)


class CudaPass:
    """One forward pass of a mini-batch; the backward pass is in the graph that it leaves."""

    def __init__(
        self,
        stages: list[Stage],
        layout: StageLayout,
        streams: Streams,
        around: Surroundings,
        mode: str,
        grad: bool,
        dependency: bool,
        ties: TiedCopies,
        parameters: Sequence[nn.Parameter] = (),
        prefix: int = 0,
    ) -> None:
        """The first `prefix` layers are frozen, and no gradient reaches them."""
        self.prefix = prefix
        self.parameters = parameters
        self.ties = ties
        self.stages = stages
        self.layout = layout
        self.streams = streams
        self.around = around
        self.mode = mode if grad else "never"
        self.grad = grad
        self.dependency = dependency
        self.recorder = Recorder(streams)
        for stage in stages:
            stage.marking = True  # the host is ahead of CUDA devices: a call for each layer costs them nothing
        self.bytes_sent = {"activations": 0, "gradients": 0, "skips": 0, "skip_gradients": 0}

    def run(self, chunks: list[Value]) -> Value:
        """Issue the whole forward pass; the gathered output of the last stage."""
        outputs = _Graph(self, chunks).outputs()
        if self.grad:
            outputs[-1] = mapped(self._whole, outputs[-1])
        gathered = gather(outputs)
        if self.ties.shared and self.grad:
            self.ties.pending = False
            for tensor in tensors_of(gathered):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)
        return gathered

    def _whole(self, tensor: Tensor) -> Tensor:
        if not differentiable(tensor):
            return tensor
        whole: Tensor = WholeBackward.apply(tensor, *self.parameters)
        if not self.dependency:
            first_when_ready(whole)
        return whole

    def _before_backward(self, gradient: Tensor) -> None:
        """The sums over copies of parameters come once, when autograd is through with all devices."""
        if not self.ties.pending:
            self.ties.pending = True
            for shared in self.ties.shared:
                shared.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._sum_gradients)

    def _sum_gradients(self) -> None:
        self.ties.pending = False
        streams = self.streams
        queue: Queue = "copy in" if streams.separate else "compute"
        for shared in self.ties.shared:
            places = [(self.layout.devices[stage], shared.op(stage, queue)) for stage in shared.stages]
            begun = [streams.now(device) for device, _ in places]
            size = shared.sum_gradients()
            for (device, op), start in zip(places, begun, strict=True):
                self.recorder.marks.append((op, device, queue, start, streams.now(device)))
            self.bytes_sent[SUMS] = self.bytes_sent.get(SUMS, 0) + size

    def graded(self, j: int) -> dict[str, bool]:
        """For each value that enters stage j, by its part, whether a gradient of it is needed."""
        return self.layout.graded_into(j, self.prefix) or {"": not self.prefix}

    def count(self, transfer: Transfer, forward: bool, tensors: tuple[Tensor | None, ...]) -> None:
        kind = (
            ("skips" if forward else "skip_gradients") if transfer.part else ("activations" if forward else "gradients")
        )
        self.bytes_sent[kind] += sum(t.numel() * t.element_size() for t in tensors if t is not None)


class _Graph:
    """The graph while it is built. The pass, which the nodes hold, does not hold it: they would hold each other."""

    def __init__(self, run: CudaPass, chunks: list[Value]) -> None:
        self.run = run
        self.state: list[Parts] = [{"": mapped(self._placed, value)} for value in chunks]
        self.waiting: dict[tuple[int, Transfer], Value | None] = {}
        self.before: dict[int, Tensor] = {}

    def outputs(self) -> list[Value]:
        """Issue all tasks; the outputs of the last stage, one for each micro-batch."""
        for cycle in clock_cycles(len(self.state), len(self.run.stages)):
            for i, j in cycle:
                self._fence(i, j)
            for i, j in cycle:
                self._compute(i, j)
        outputs = [parts[""] for parts in self.state]
        for phony in self.before.values():
            outputs[-1] = self._tied(outputs[-1], phony)
        return outputs

    def _placed(self, tensor: Tensor) -> Tensor:
        """An input on the first device, with a version counter of its own, for layers that work in place."""
        moved = tensor.to(self.run.stages[0].device, non_blocking=True)
        return moved if moved.requires_grad else moved.data

    def _fence(self, i: int, j: int) -> None:
        run = self.run
        for transfer in run.layout.into(j, copied=True):
            source, target = run.layout.devices[transfer.source], run.layout.devices[transfer.target]
            value = self.waiting[i, transfer]
            if value is None:
                continue
            copied = self._node(together(partial(Copy.apply, run, i, transfer, source, target), value))
            self.waiting[i, transfer] = self._node(together(partial(Arrive.apply, run, i, target), copied))

    def _compute(self, i: int, j: int) -> None:
        run, stage = self.run, self.run.stages[j]
        parts: Parts = {
            transfer.part: self.waiting.pop((i, transfer)) for transfer in run.layout.transfers if transfer.target == j
        }
        parts, graded = parts or self.state[i], run.graded(j)
        parts = {
            part: value if graded[part] or value is None else mapped(Tensor.detach, value)
            for part, value in parts.items()
        }
        phony, goes_back = self.before.pop(j, None), run.layout.goes_back(j, run.prefix)
        # integers have no place in the graph, nor has what needs no gradient
        tokens = not (graded[""] and differentiable(tensors_of(parts[""])[0]))
        if phony is not None and not tokens:
            parts[""] = self._tied(parts[""], phony)
        if goes_back and recomputed(i, len(self.state), run.mode):
            task = CheckpointedTask(run, stage, i)
            outs = task.run(parts, phony)
        else:
            task, outs = None, self._plain(stage, i, parts)
            if phony is not None and tokens:
                outs[""] = self._tied(outs[""], phony)
        device = run.layout.devices[j]
        outs = {part: self._leave(i, device, value) for part, value in outs.items()}
        if run.grad and goes_back:
            self._order(task, j, outs)
        self.state[i] = {"": outs[""]}
        for transfer in run.layout.out_of(j):
            self.waiting[i, transfer] = outs[transfer.part]

    def _plain(self, stage: Stage, i: int, parts: Parts) -> Parts:
        run, device = self.run, self.run.layout.devices[stage.number]
        if run.grad and run.graded(stage.number)[""]:  # else no gradient of its input says that its pass has ended
            parts[""] = _marked(run, stage.number, i, device, False, parts[""])
        with run.recorder.computing(Op(stage.number, "F", i), device), stage.annotating_errors("forward", i):
            outs = stage.run(parts, i, run.around)
        if run.grad:
            part = next((part for part, value in outs.items() if value is not None and _leads_back(value)), "")
            outs[part] = _marked(run, stage.number, i, device, True, outs[part])
        return outs

    def _leave(self, i: int, device: int, value: Value | None) -> Value | None:
        if value is None:
            return None
        return self._node(together(partial(Leave.apply, self.run, i, device), value))

    def _order(self, task: CheckpointedTask | None, j: int, outs: Parts) -> None:
        """Tie a recomputation to its place: before the backward task of the next micro-batch or, without the
        dependency, to the gradient of its own output."""
        if task is None and not self.run.dependency:
            return
        if _leads_back(outs[""]):
            outs[""], phony = self._forked(outs[""])
        else:  # a value of integers leads nowhere: what follows in time is still part of the graph
            phony = torch.zeros(0, device=self.run.stages[j].device, requires_grad=True)
        if task is not None:
            phony = self._node(Recompute.apply(task, phony))
        if self.run.dependency:
            self.before[j] = phony
        elif _leads_back(outs[""]):  # else the backward task finds that it has to recompute
            outs[""] = self._tied(outs[""], phony)

    def _node(self, value: V) -> V:
        """A value made by nodes that are no tasks."""
        if not self.run.dependency:
            first_when_ready(*tensors_of(value))
        return value

    def _forked(self, value: Value) -> tuple[Value, Tensor]:
        first, phony = fork(tensors_of(value)[0])
        return _begun(value, self._node(first)), phony

    def _tied(self, value: Value, phony: Tensor) -> Value:
        return _begun(value, self._node(join(tensors_of(value)[0], phony)))


class Leave(Function):
    """Autograd identity at the end of a task: in forward the copy stream waits for it, in backward the compute stream
    waits for its gradient."""

    @staticmethod
    def forward(ctx: Any, run: CudaPass, i: int, device: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.i, ctx.device = run, i, device
        run.streams.copy_after_compute(device, i)
        ctx.mark_non_differentiable(*(t for t in tensors if not differentiable(t)))
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.run.streams.compute_after_copy(ctx.device, ctx.i)
        for gradient in gradients:
            if gradient is not None:
                ctx.run.streams.used_by_compute(gradient, ctx.device)
        return None, None, None, *gradients


class Arrive(Function):
    """Autograd identity at the start of a task: the mirror image of Leave."""

    @staticmethod
    def forward(ctx: Any, run: CudaPass, i: int, device: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.i, ctx.device = run, i, device
        run.streams.compute_after_copy(device, i)
        for tensor in tensors:
            run.streams.used_by_compute(tensor, device)
        ctx.mark_non_differentiable(*(t for t in tensors if not differentiable(t)))
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.run.streams.copy_after_compute(ctx.device, ctx.i)
        return None, None, None, *gradients


class Copy(Function):
    """A value to the next device, its gradient back, both on copy streams."""

    @staticmethod
    def forward(
        ctx: Any, run: CudaPass, i: int, transfer: Transfer, source: int, target: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.i, ctx.transfer, ctx.ends = run, i, transfer, (source, target)
        copied = _copied(
            run, Op(transfer.target, "copy", i, transfer.part, transfer.source), i, source, target, tensors
        )
        run.count(transfer, True, tensors)
        ctx.mark_non_differentiable(*(t for t in copied if t is not None and not differentiable(t)))
        return copied  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        run, i, transfer, (source, target) = ctx.run, ctx.i, ctx.transfer, ctx.ends
        op = Op(transfer.source, "copy", i, transfer.part, transfer.target)
        copied = _copied(run, op, i, target, source, gradients)
        run.count(transfer, False, gradients)
        return None, None, None, None, None, *copied


def _copied(
    run: CudaPass, op: Op, i: int, source: int, target: int, tensors: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    streams = run.streams
    queues = [(target, "copy in")] if streams.separate else [(source, "compute"), (target, "compute")]
    with streams.copying(source, target, i):
        start = [streams.now(device, i) for device, _ in queues]
        copied = tuple(None if t is None else _to(t, streams.devices[target]) for t in tensors)
        for tensor in (t for t in tensors if t is not None):
            streams.used_by_copy(tensor, source, i)
        for (device, queue), begun in zip(queues, start, strict=True):
            run.recorder.marks.append((op, device, queue, begun, streams.now(device, i)))  # type: ignore[arg-type]
    return copied


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy, also where both ends are the same device."""
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


class MarkBackward(Function):
    """Notes when the backward pass of a task begins (after its output) and ends (before its input)."""

    @staticmethod
    def forward(ctx: Any, run: CudaPass, j: int, i: int, device: int, begins: bool, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.op, ctx.device, ctx.begins = run, Op(j, "B", i), device, begins
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        recorder, mark = ctx.run.recorder, ctx.run.streams.now(ctx.device)
        if ctx.begins:
            recorder.begun[ctx.op] = mark
        else:
            start: TimePoint = recorder.begun.pop(ctx.op, mark)
            recorder.marks.append((ctx.op, ctx.device, "compute", start, mark))
        return None, None, None, None, None, gradient


def _leads_back(value: Value) -> bool:
    return differentiable(tensors_of(value)[0])


def _marked(run: CudaPass, j: int, i: int, device: int, begins: bool, value: Value) -> Value:
    first = tensors_of(value)[0]
    if not differentiable(first):
        return value
    if not begins and not first.requires_grad:
        first = first.detach().requires_grad_()
    return _begun(value, MarkBackward.apply(run, j, i, device, begins, first))


def _begun(value: Value, first: Tensor) -> Value:
    """The value with another first tensor, in every place that has it."""
    found: Value = Form.of(value).built([first, *distinct(value)[1:]])
    return found
