"""The outer autograd graph over CPU devices: its nodes carry zero-size tokens and only issue jobs.

    Enter -> Task(0,0) -> Copy -> Task(0,1) -> Exit -> loss

A node's forward submits the forward task, its backward the backward task. Exit waits for the outputs and hands in the
loss gradient; Enter's backward joins all queues, raises the first error and returns the gradients of the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from engines.gpipe.cpu_pipeline import CpuPass, Slot
from engines.gpipe.dependency import check_whole, first_when_ready, fork, join, let_hooks_skip_empty
from engines.gpipe.microbatch import gather
from harness.runtime.autograd import differentiable
from harness.runtime.values import Form, Value, tensors_of
from harness.schedule.builders.gpipe import clock_cycles
from harness.schedule.transfers import Transfer


def _abandoning(backward: Callable[..., Any]) -> Callable[..., Any]:
    """An error in the calling thread (Ctrl-C) during the backward pass ends the work of the queues, too."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Tensor | None) -> Any:
        try:
            return backward(ctx, *gradients)
        except BaseException as error:
            ctx.run.abandon(error)
            raise

    return wrapper


class Enter(Function):
    """The inputs -> a token for each micro-batch; backward joins the queues and returns the inputs' gradients."""

    @staticmethod
    def forward(ctx: Any, run: CpuPass, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(torch.empty(0) for _ in range(run.m))

    @staticmethod
    @_abandoning
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        run: CpuPass = ctx.run
        run.issue_sums()
        run.join_queues()
        gradients = run.input_gradients()
        run.slots.clear()
        return None, None, *gradients


class Task(Function):
    """Forward issues the forward task, backward the backward task. With recomputation this is Checkpoint."""

    @staticmethod
    def forward(ctx: Any, run: CpuPass, slot: Slot, token: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.slot = run, slot
        run.issue_forward(slot)
        return torch.empty(0)

    @staticmethod
    @_abandoning
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None, None]:
        ctx.run.issue_backward(ctx.slot)
        return None, None, None


class Recompute(Function):
    """Backward issues the recomputation into the slot that it shares with Task; it needs no gradient."""

    @staticmethod
    def forward(ctx: Any, run: CpuPass, slot: Slot, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.slot = run, slot
        return torch.empty(0)

    @staticmethod
    @_abandoning
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None, None]:
        ctx.run.issue_recompute(ctx.slot)
        return None, None, None


class Copy(Function):
    """Forward issues the copy of a value to the next stage, backward that of its gradient."""

    @staticmethod
    def forward(ctx: Any, run: CpuPass, i: int, transfer: Transfer, token: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.i, ctx.transfer = run, i, transfer
        run.issue_copy(i, transfer)
        return torch.empty(0)

    @staticmethod
    @_abandoning
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None, None, None]:
        ctx.run.issue_gradient_copy(ctx.i, ctx.transfer)
        return None, None, None, None


class Exit(Function):
    """Tokens -> the gathered outputs, once they are there; backward hands the loss gradient to the last stage.

    The parameters are there as in `WholeBackward`.
    """

    @staticmethod
    def forward(ctx: Any, run: CpuPass, tokens: int, *tokens_and_parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs = run.outputs()
        ctx.run, ctx.tokens, ctx.parameters = run, tokens, tokens_and_parameters[tokens:]
        gathered = gather(outputs)
        ctx.sizes = [[t.size(0) for t in column] for column in zip(*map(tensors_of, outputs), strict=True)]
        run.output_form = Form.of(gathered)
        result = tensors_of(gathered)
        ctx.mark_non_differentiable(*(t for t in result if not differentiable(t)))
        return result

    @staticmethod
    @_abandoning
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        run: CpuPass = ctx.run
        if run.backward_begun:
            raise RuntimeError(
                "this output of the pipeline has had its backward pass: what it needs is freed after the first one, "
                "with retain_graph, too -> call the pipeline again"
            )
        if torch.is_grad_enabled():
            raise RuntimeError("the pipeline has no second derivatives: call backward without create_graph")
        check_whole()
        let_hooks_skip_empty(ctx.parameters)
        run.backward_begun = True
        for shared in run.shared:
            shared.begin()
        pieces = [None if g is None else g.split(sizes) for g, sizes in zip(gradients, ctx.sizes, strict=True)]
        for i in range(run.m):
            run.slots[i, run.n - 1].grads_out[""] = tuple(None if p is None else p[i] for p in pieces)
        return None, None, *(torch.empty(0) for _ in range(ctx.tokens)), *(None,) * len(ctx.parameters)


def run_cpu_pass(
    run: CpuPass, value: Value, anchor: Tensor, dependency: bool, parameters: Sequence[Tensor] = ()
) -> Value:
    """Issue the whole forward pass in clock-cycles and return the gathered output (torchgpipe, section 3.2)."""
    if not run.grad:
        return _run_without_graph(run)
    graph = _Graph(run, list(Enter.apply(run, anchor, *tensors_of(value))), dependency)
    for cycle in clock_cycles(run.m, run.n):
        for i, j in cycle:
            graph.fence(i, j)
        for i, j in cycle:
            graph.compute(i, j)
    tokens = graph.exits()
    outputs: tuple[Tensor, ...] = Exit.apply(run, len(tokens), *tokens, *parameters)
    return run.output_form.built(outputs)


def _run_without_graph(run: CpuPass) -> Value:
    for cycle in clock_cycles(run.m, run.n):
        for i, j in cycle:
            for transfer in run.layout.into(j, copied=True):
                run.issue_copy(i, transfer)
        for i, j in cycle:
            run.issue_forward(run.slots[i, j])
    return gather(run.outputs())


class _Graph:
    """The outer graph while it is built: a token for each micro-batch, one for each value that waits for its stage.

    token (i, j-1) --Copy--> join --> Task(i, j) --> fork --> ...
                              ^                       |
          phony of (i-1, j) --'   (dependency)        '--> [Recompute] --> phony for (i+1, j)

    Without the dependency a recomputation is joined to its own task's output: it waits for its gradient alone.

    Task(i, j) --> fork --------------> join --Copy--> ...
                    '--> [Recompute] ----^
    """

    def __init__(self, run: CpuPass, tokens: list[Tensor], dependency: bool) -> None:
        self.run = run
        self.tokens = tokens
        self.dependency = dependency
        self.before: dict[int, Tensor] = {}  # stage -> what its next micro-batch has to wait for
        self.waiting: dict[tuple[int, Transfer], Tensor] = {}  # values that left their stage

    def fence(self, i: int, j: int) -> None:
        """Issue the copies that task (i, j) needs."""
        for transfer in self.run.layout.into(j, copied=True):
            self.waiting[i, transfer] = self._node(Copy.apply(self.run, i, transfer, self.waiting[i, transfer]))

    def compute(self, i: int, j: int) -> None:
        run, slot = self.run, self.run.slots[i, j]
        token = self.tokens[i]
        for transfer in [h for h in run.layout.transfers if h.target == j]:
            token = self._node(join(token, self.waiting.pop((i, transfer))))
        if j in self.before:
            token = join(token, self.before.pop(j))
        token, phony = self._fork(Task.apply(run, slot, token))
        if slot.recompute:
            phony = self._node(Recompute.apply(run, slot, phony))
        if self.dependency:
            self.before[j] = phony
        for transfer in run.layout.out_of(j):
            token, self.waiting[i, transfer] = self._fork(token)
        self.tokens[i] = token
        if slot.recompute and not self.dependency:
            self._tie_to_output(i, j, phony)

    def _tie_to_output(self, i: int, j: int, phony: Tensor) -> None:
        """Without the dependency a recomputation waits for the gradient of its task's own output."""
        boundary = next((transfer for transfer in self.run.layout.out_of(j) if not transfer.part), None)
        if boundary is None:
            self.tokens[i] = self._node(join(self.tokens[i], phony))
        else:
            self.waiting[i, boundary] = self._node(join(self.waiting[i, boundary], phony))

    def _fork(self, token: Tensor) -> tuple[Tensor, Tensor]:
        token, phony = fork(token)
        return self._node(token), phony

    def _node(self, token: Tensor) -> Tensor:
        """A token of a node that is no task."""
        if not self.dependency:
            first_when_ready(token)
        return token

    def exits(self) -> list[Tensor]:
        """The tokens that Exit takes; what the last micro-batches leave hangs on it."""
        return [*self.tokens, *self.before.values()]
