"""Fork and join: edges that carry no data and make autograd wait (torchgpipe, section 3.2.2).

forward    x --Fork--> x                      y --Join--> y
                \\---------- phony -------------/
backward   the gradient of x waits until the one of y has passed: whatever follows Join is done before what
           precedes Fork
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Fork(Function):
    """x -> (x, phony)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.detach(), torch.empty(0, device=x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> Tensor | None:
        return gradient


class Join(Function):
    """(x, phony) -> x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient, None


class WholeBackward(Function):
    """(x, parameters) -> x; refuses a backward pass that wants only some gradients.

    The parameters are there so that a pass which wants only theirs comes by; they get no gradient here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        check_whole()
        let_hooks_skip_empty(ctx.parameters)
        return gradient, *(None,) * len(ctx.parameters)


class _Empty(threading.local):
    gradient = False


_empty = _Empty()


class GradientHook:
    """A parameter's hook that is not called where autograd hands the parameter no gradient.

    Hooks before accumulation get None then; those after it (`after`) follow in the same thread.
    """

    def __init__(self, hook: Callable[[Any], Any], after: bool) -> None:
        self.hook, self.after = hook, after

    def __call__(self, value: Any) -> Any:
        if not self.after:
            _empty.gradient = value is None
        return None if _empty.gradient else self.hook(value)


def let_hooks_skip_empty(parameters: Iterable[Tensor]) -> None:
    """Have the hooks of parameters skip that the outer graph, where they are for `check_whole`, has no gradients."""
    for parameter in parameters:
        after: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if after and not parameter._backward_hooks:
            parameter.register_hook(lambda _: None)
        before: dict[int, Any] = parameter._backward_hooks or {}
        for hooks, is_after in ((before, False), (after, True)):
            for key, hook in hooks.items():
                if not isinstance(hook, GradientHook):
                    hooks[key] = GradientHook(hook, is_after)


def check_whole() -> None:
    """Raise RuntimeError within torch.autograd.grad or backward(inputs=...)."""
    if not torch.autograd._is_checkpoint_valid():
        raise RuntimeError(
            "a pipeline fills the gradients of all its inputs and parameters at once: torch.autograd.grad and "
            "backward(inputs=...) cannot go through it -> backward(), then .grad"
        )


FIRST = 1 << 48


def first_when_ready(*tensors: Tensor) -> None:
    """Have autograd take the nodes that made these tensors before all others as soon as their gradients are there.

    Among nodes that are ready autograd takes the one created last. torchgpipe creates the nodes of its tasks in worker
    threads, with numbers of their own, so that its copies and recomputations go before every waiting task.
    """
    for node in {tensor.grad_fn for tensor in tensors} - {None}:
        node._set_sequence_nr(node._sequence_nr() | FIRST)  # type: ignore[union-attr]


def fork(x: Tensor) -> tuple[Tensor, Tensor]:
    forked: tuple[Tensor, Tensor] = Fork.apply(x)
    return forked


def join(x: Tensor, phony: Tensor) -> Tensor:
    joined: Tensor = Join.apply(x, phony)
    return joined
