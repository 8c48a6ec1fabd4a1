"""Checkpointing on CUDA devices as two autograd functions with shared memory (torchgpipe, section 3.2.4).

forward    Checkpoint runs the task without a graph             Recompute does nothing
backward   Recompute runs it again with one: it needs no        Checkpoint goes backward through
           gradient, so it overlaps the copy of the gradient    that graph
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from engines.gpipe.microbatch import Parts
from engines.gpipe.stage import Stage
from harness.core.op import Kind, Op
from harness.runtime.autograd import differentiable, non_leaf
from harness.runtime.recomputation import Before
from harness.runtime.training_state import RandomNumbers
from harness.runtime.values import Form, distinct, mapped

if TYPE_CHECKING:
    from engines.gpipe.cuda_pipeline import CudaPass


_rewinding = threading.Lock()  # the CPU's generator is one for all of autograd's device threads


@dataclass(eq=False)
class CheckpointedTask:
    """The shared memory of Checkpoint and Recompute for task (i, j) (torchgpipe, section 3.2.4)."""

    run_of: CudaPass
    stage: Stage
    i: int
    ins: Parts = field(default_factory=dict)
    leaves: list[Tensor] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)
    random: RandomNumbers | None = None
    before: Before | None = None

    @property
    def device(self) -> int:
        return self.run_of.layout.devices[self.stage.number]

    def run(self, parts: Parts, phony: Tensor | None) -> Parts:
        """Through Checkpoint, so that the graph has one node for the whole task, which `phony` ties to its place."""
        self.ins = {part: mapped(Tensor.detach, value) for part, value in parts.items()}
        anchor = torch.zeros((), device=self.stage.device, requires_grad=True) if phony is None else phony
        flat = iter(Checkpoint.apply(self, anchor, *_flat(parts)))
        return {part: form.built([next(flat) for _ in form.marks]) for part, form in self.forms.items()}

    def compute(self) -> list[Tensor]:
        """The forward task, without a graph."""
        self.random = RandomNumbers(self.stage.device)
        with self._at_work("F", "forward"), torch.no_grad():
            outs, self.before = self.stage.run_kept(self.ins, self.i, self.run_of.around)
        self.forms = {part: Form.of(value) for part, value in outs.items()}
        return _flat(outs)

    def recompute(self) -> None:
        """Run it again with a graph, with the same random numbers."""
        ins = self.ins
        if self.stage.number == 0:  # the caller's own tensors
            ins = {part: mapped(Tensor.clone, value) for part, value in ins.items()}
        graded = self.run_of.graded(self.stage.number)
        leaves = {part: mapped(partial(_leaf, graded=graded[part]), value) for part, value in ins.items()}
        self.leaves = _flat(leaves)
        assert self.random is not None
        with _rewinding, self.random.again(), self._at_work("R", "recomputation"), torch.enable_grad():
            ins = {part: mapped(non_leaf, value) for part, value in leaves.items()}
            outs = self.stage.run_again(ins, self.i, self.run_of.around, self.before)
        self.outs = _flat(outs)
        self.ins, self.before = {}, None

    def backward(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Backward through the recomputed graph; the gradients of the task's inputs.

        Where nothing took the boundary value, no gradient of it has led to Recompute.
        """
        if self.ins:
            self.recompute()
        pairs = [(o, g) for o, g in zip(self.outs, gradients, strict=True) if o.requires_grad and g is not None]
        with self._at_work("B", "backward"):
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        found = [leaf.grad for leaf in self.leaves]
        self.leaves, self.outs = [], []
        return found

    @contextmanager
    def _at_work(self, kind: Kind, phase: str) -> Iterator[None]:
        op = Op(self.stage.number, kind, self.i)
        with self.run_of.recorder.computing(op, self.device), self.stage.annotating_errors(phase, self.i):
            yield


def _flat(parts: Parts) -> list[Tensor]:
    """The tensors of all values and skips, in their order; one that is in a value several times once."""
    return [tensor for value in parts.values() for tensor in distinct(value)]


def _leaf(tensor: Tensor, graded: bool) -> Tensor:
    return tensor.detach().requires_grad_(graded and differentiable(tensor))


class Checkpoint(Function):
    """A task's forward without a graph; backward uses what Recompute has left in the shared memory."""

    @staticmethod
    def forward(ctx: Any, task: CheckpointedTask, anchor: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.task = task
        outs = tuple(t.detach() for t in task.compute())
        ctx.mark_non_differentiable(*(t for t in outs if not differentiable(t)))
        return outs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.task.backward(gradients)


class Recompute(Function):
    """Backward recomputes the task; it needs no gradient, only its place in the order."""

    @staticmethod
    def forward(ctx: Any, task: CheckpointedTask, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.task = task
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None]:
        ctx.task.recompute()
        return None, None
