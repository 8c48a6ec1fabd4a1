"""`precision.cuda_graphs`: runs of layers whose kernels a GPU starts by itself, as the CUDA graphs of their passes.

    layers    Conv, Norm, ReLU   Dropout(0.1)   Linear, GELU, Linear
    parts     one run            as it is       one run                  a graph of each pass, forward and backward

Graphs are captured in the first pass, by torch.cuda.make_graphed_callables: they repeat its kernels, in the same
memory. So a layer is in a run if nothing of what it does differs from pass to pass but the numbers in its tensors. A
value of another shape than the first one goes through the layers as they are.

One micro-batch is in the graphs at a time: its backward pass comes before the next forward pass.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from harness.nn.skip import named_layers
from harness.runtime.autograd import non_leaf
from harness.runtime.compiled_layers import needs_python
from harness.runtime.training_state import RandomNumbers
from harness.runtime.values import mapped, tensors_of

CAPTURE = threading.Lock()
"""Held while graphs are captured: meanwhile no other thread may allocate memory of CUDA's, as pinned memory is."""
Signature = tuple[tuple[torch.Size, torch.dtype, bool], ...]


class GraphedLayers:
    """Layers on `device`, called in order."""

    def __init__(self, layers: nn.Sequential, device: torch.device) -> None:
        self.layers, self.device = layers, device
        self.parts = list(_parts(layers))
        self.parameters = dict.fromkeys(p for run in self.runs for p in run.parameters() if p.requires_grad)
        self._captured: Signature | None = None

    @property
    def runs(self) -> list[_Run]:
        """The parts that are captured."""
        return [part for part in self.parts if isinstance(part, _Run)]

    def __call__(self, value: Any) -> Any:
        signature = tuple((one.shape, one.dtype, one.requires_grad) for one in tensors_of(value))
        if self._captured is None:
            self._capture(value)
            self._captured = signature
        return _through(self.parts, value) if signature == self._captured else self.layers(value)

    def zero_grad(self) -> None:
        """Give each parameter of a graph a gradient of zero to add to: else autograd takes the graph's own memory for
        it, which the backward pass of the next micro-batch writes."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def _capture(self, value: Any) -> None:
        """Make the graphs of all runs, with inputs like those of a pass that begins with this value."""
        if not self.runs:
            return
        with CAPTURE, _unchanged(self.layers), RandomNumbers(self.device).again():
            samples = self._samples(mapped(_like, value))
            if samples:
                torch.cuda.make_graphed_callables(tuple(self.runs), samples, allow_unused_input=True)

    def _samples(self, value: Any) -> tuple[tuple[Any], ...]:
        """The inputs of the runs. One that draws random numbers, as functional dropout does, is none from now on: in a
        graph they would be others."""
        found, parts = [], list[nn.Module]()
        for part in self.parts:
            given, drawn = mapped(_like, value), RandomNumbers(self.device)
            value = part(value)
            if not isinstance(part, _Run):
                parts.append(part)
            elif drawn.are_next():
                parts.append(part)
                found.append((given,))
            else:
                parts += part.children()
        self.parts = parts
        return tuple(found)


def _like(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _Run(nn.Sequential):
    """Consecutive layers in one graph."""

    def forward(self, value: Any) -> Any:
        return _through(self._modules.values(), mapped(non_leaf, value))  # the first layer may work in place


def _through(parts: Iterable[Any], value: Any) -> Any:
    for part in parts:
        value = part(value)
    return value


def _parts(layers: nn.Sequential) -> Iterator[nn.Module]:
    """The layers, those that are next to one another and static as runs."""
    named = named_layers(layers)
    users = Counter(module for _, layer in named for module in layer.modules())

    def static(item: tuple[str, nn.Module]) -> bool:
        return not any(users[module] > 1 or needs_python(module) or _draws(module) for module in item[1].modules())

    for is_static, items in groupby(named, static):
        if is_static:
            yield _Run(OrderedDict(items))
        else:
            yield from (layer for _, layer in items)


def _draws(module: nn.Module) -> bool:
    """Whether a layer of torch.nn draws random numbers: in a graph they would be others than without."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


@contextmanager
def _unchanged(layers: nn.Module) -> Iterator[None]:
    """Within it passes may change buffers, such as statistics, or put others in their places; afterwards they are as
    before, in the same memory."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in layers.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    with torch.no_grad():
        for module, name, buffer, value in before:
            module._buffers[name] = buffer
            buffer.copy_(value)
