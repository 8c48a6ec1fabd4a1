"""The first node of a task's own graph: behind it, layers may work in place on what has arrived."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class Begin(Function):
    """A leaf -> the same values, which an in-place layer may change (a leaf itself may not be)."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def begun(leaf: Tensor) -> Tensor:
    """The tensor to give to the first layer."""
    value: Tensor = Begin.apply(leaf) if leaf.requires_grad else leaf
    return value
