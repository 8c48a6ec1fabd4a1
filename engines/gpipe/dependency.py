"""Fork and join: edges that carry no data and make autograd wait (torchgpipe, section 3.2.2).

forward    x --Fork--> x                      y --Join--> y
                \\---------- phony -------------/
backward   the gradient of x waits until the one of y has passed: whatever follows Join is done before what
           precedes Fork
"""

from __future__ import annotations

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
        ctx.count = len(parameters)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        check_whole()
        return gradient, *(None,) * ctx.count


def check_whole() -> None:
    """Raise RuntimeError within torch.autograd.grad or backward(inputs=...)."""
    if not torch.autograd._is_checkpoint_valid():
        raise RuntimeError(
            "a pipeline fills the gradients of all its inputs and parameters at once: torch.autograd.grad and "
            "backward(inputs=...) cannot go through it -> backward(), then .grad"
        )


def fork(x: Tensor) -> tuple[Tensor, Tensor]:
    forked: tuple[Tensor, Tensor] = Fork.apply(x)
    return forked


def join(x: Tensor, phony: Tensor) -> Tensor:
    joined: Tensor = Join.apply(x, phony)
    return joined
