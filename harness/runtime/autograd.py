"""Autograd helpers of the engines: a first node for a task's own graph, and the search for a layer that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class Identity(Function):
    """A tensor -> the same values in a node of the graph; the gradient that goes back is contiguous."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def differentiable(tensor: Tensor) -> bool:
    """Whether a tensor's dtype is one that has gradients: real or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def non_leaf(tensor: Tensor) -> Tensor:
    """The tensor to give to a task's first layer, which may change it in place: a leaf that requires a gradient may not
    be changed."""
    value: Tensor = Identity.apply(tensor) if tensor.requires_grad else tensor
    return value


def new_leaf(tensor: Tensor) -> Tensor:
    """The same values where a task's own graph begins; its `grad` is what the task before gets."""
    return tensor.detach().requires_grad_(differentiable(tensor))


def on_backward(value: Any, call: Callable[[], None]) -> None:
    """Have the backward pass call `call` when the gradient of `value`, a tensor or a tuple of them, is there.

    The first tensor that requires a gradient decides; if none does, `call` is never called.
    """
    for tensor in value if isinstance(value, tuple) else (value,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: call())
            return


def failing_layer(
    layers: Sequence[tuple[str, nn.Module]],
    run: Callable[[], Iterable[tuple[Tensor, Tensor | None]]],
    leaves: Iterable[Tensor],
) -> str:
    """Return the name of the layer whose backward pass fails, "unknown" if none fails again.

    `run` repeats the forward pass of `layers`, each once and in their order, and returns the tensors with which the
    backward pass begins, each with its gradient. `leaves` are the inputs.
    """
    reached, names = ["unknown"], iter([name for name, _ in layers])

    def watch(module: nn.Module, inputs: Any, output: Any) -> Any:
        """After the layer's own hooks of its output, any of which may be what fails."""
        after = tuple(map(non_leaf, output)) if isinstance(output, tuple) else non_leaf(output)
        on_backward(after, partial(reached.append, next(names, "unknown")))
        return after

    modules = dict.fromkeys(layer for _, layer in layers)
    hooks = [module.register_forward_hook(watch) for module in modules]
    parameters = (parameter for module in modules for parameter in module.parameters())
    wanted = [tensor for tensor in (*leaves, *parameters) if tensor.requires_grad]
    try:
        pairs = [(out, gradient) for out, gradient in run() if gradient is not None and out.requires_grad]
        torch.autograd.grad([out for out, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True)
    except Exception:  # the same error again: the layer that was reached last has it
        return reached[-1]
    finally:
        for hook in hooks:
            hook.remove()
    return "unknown"
