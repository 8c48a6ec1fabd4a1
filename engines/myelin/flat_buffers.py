"""A stage's parameters and their gradients in two flat buffers.

weights     | 0.weight       | 0.bias | 2.weight ...      every parameter is a view of its place
gradients   | 0.weight       | 0.bias | 2.weight ...      and so is its gradient, once there is one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Place:
    """Position of a parameter in the flat buffer: the elements `start` .. `stop` - 1."""

    start: int
    stop: int
    shape: torch.Size

    def of(self, buffer: Tensor) -> Tensor:
        """The parameter's part of a flat buffer, in its own shape."""
        return buffer[self.start : self.stop].view(self.shape)


class FlatBuffers:
    """Parameters by name, in their order; from now on they are views of `weights`.

    As under torch's optimizers a parameter without a gradient has None. Its first gradient of a step is moved into
    `gradients` (a sparse one with zeros where it has no rows), later ones are added there.
    All have the run's dtype: `harness.checks.layer_traits` refuses others.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters, self.dtype = parameters, dtype
        self.places: dict[str, Place] = {}
        self.size = 0
        for name, parameter in parameters.items():
            stop = self.size + parameter.numel()
            self.places[name] = Place(self.size, stop, parameter.shape)
            self.size = stop
        self.device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        self.weights = torch.empty(self.size, dtype=dtype, device=self.device)
        self.gradients = torch.zeros_like(self.weights)
        self.views = {name: place.of(self.gradients) for name, place in self.places.items()}
        for name, parameter in parameters.items():
            own = self.places[name].of(self.weights)
            own.copy_(parameter.detach())
            parameter.data = own
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_into(self.views[name]))

    @property
    def half(self) -> bool:
        """Whether the optimizer needs weights and gradients in float32 next to these."""
        return self.dtype in HALF

    @property
    def wide(self) -> torch.dtype:
        """The dtype that the optimizer computes in."""
        return torch.float32 if self.half else self.dtype

    def begin(self) -> None:
        """There are no gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def collect_gradients(self) -> list[bool]:
        """Copy all gradients into the flat buffer, zeros for those that are None; return for each parameter if it has
        one."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                self.views[name].zero_()
            else:
                _into(self.views[name])(parameter)
        return [parameter.grad is not None for parameter in self.parameters.values()]


def _into(view: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            parameter.grad = view

    return move
