"""A model as a chain of layers that run one at a time, as a pipeline's stages do.

    forward    x0 -> [layer 0] -> x1 | x1' -> [layer 1] -> x2 | x2' -> ...          '  cut by detach, same storage
    backward                     g1 <- [layer 0]  ...  g2 <- [layer 1] <- g3
    skip       layer 0 stashes s | s' popped by layer 5; its gradient waits for layer 0's backward

Storages, gradients and saved tensors are those of the uncut model, which runs as one task, too (`Chain.whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness.interfaces import Model
from harness.nn.skip import carried, layer_skips, named_layers
from harness.nn.tied import moved
from harness.runtime.autograd import non_leaf
from harness.runtime.compiled_layers import compile_layers
from harness.runtime.foreign_layers import same_memory
from harness.runtime.training_state import cast_batch, put_channels_last
from harness.runtime.values import Value

Phase = Literal["forward", "backward"]
WHOLE = -1
"""The index of all layers as one task."""
Observer = Callable[[int, Phase], AbstractContextManager[object]]


@dataclass
class Task:
    """One layer's part of a pass: its input and popped skips, cut off what made them; its output and stashed skips."""

    entry: Value
    popped: dict[str, Tensor]
    output: Value
    stashed: dict[str, Tensor]


class Chain:
    """A model's layers on a device, with one micro-batch to run through them."""

    def __init__(
        self,
        model: Model,
        micro_batch: int,
        dtype: torch.dtype,
        device: torch.device,
        autocast: str | None = None,
        channels_last: bool = False,
        compiled: bool = False,
    ) -> None:
        with device:
            self.layers = moved(model.layers(), dtype)
            if channels_last:
                put_channels_last(self.layers)
            batch = model.sample(micro_batch)
        if compiled:
            compile_layers(self.layers)
        self.batch = cast_batch(batch, str(dtype).removeprefix("torch."))
        self.model, self.device = model, device
        self.same_memory = tuple(same_memory(self.layers))
        self.names = [name for name, _ in named_layers(self.layers)]
        self.skips = layer_skips(named_layers(self.layers))
        self.autocast = getattr(torch, autocast) if autocast else None
        for parameter in self.layers.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def step(self, observer: Observer) -> None:
        """Forward and backward; parameters' gradients accumulate as those of one micro-batch among several do."""
        self.backward(self.forward(observer), observer)

    def whole(self, observer: Observer) -> None:
        """`step` without cuts: all layers as one task, of index `WHOLE`, like those of one stage."""
        value: Value = self.batch.inputs
        with self._autocast(), observer(WHOLE, "forward"):
            for index, layer in enumerate(self.layers):
                try:
                    value = layer(value)
                except Exception as error:
                    self._name_layer(error, index)
                    raise
        with self._naming(len(self.layers) - 1):
            output = _checked(value)
        with self._naming(WHOLE):  # autograd does not say of which layer an error is
            _run_backward(zip(tensors(output), self._from_loss(output), strict=True), observer, WHOLE)

    def backward(self, tasks: list[Task], observer: Observer) -> None:
        """The backward pass of what `forward` has run, from the loss on."""
        self._backward(tasks, self._from_loss(tasks[-1].output), observer)

    def forward(self, observer: Observer) -> list[Task]:
        """Run each layer on its own, under `observer(index, "forward")`."""
        value: Value = self.batch.inputs
        skips: dict[str, Tensor] = {}
        tasks = []
        for index, layer in enumerate(self.layers):
            entry = cut(value)
            popped = {s.name: _cut(skips.pop(s.name)) for s in self.skips if s.target == index}
            with carried(popped) as left, self._autocast(), self._naming(index):
                seen = _writable(entry) if _works_in_place(layer) else entry
                with observer(index, "forward"):
                    value = layer(seen)
                tasks.append(Task(entry, popped, _checked(value), dict(left)))
            skips.update(left)
        return tasks

    def _backward(self, tasks: list[Task], grads: list[Tensor | None], observer: Observer) -> None:
        """Run the layers' backward passes from the last to the first; a task is freed when its own has ended.

        `grads` are those of the last layer's outputs, None for an output that the loss does not depend on.
        """
        waiting: dict[str, Tensor | None] = {}
        while tasks:
            task, index = tasks.pop(), len(tasks)
            results = [*tensors(task.output), *task.stashed.values()]
            grads += [waiting.pop(name) for name in task.stashed]
            with self._naming(index):
                _run_backward(zip(results, grads, strict=True), observer, index)
            waiting |= {name: tensor.grad for name, tensor in task.popped.items()}
            grads = [t.grad for t in tensors(task.entry)]

    def _from_loss(self, output: Value) -> list[Tensor | None]:
        """The gradients of the outputs; None for one that the loss does not depend on."""
        output = cut(output)
        loss = self.model.loss(output, self.batch.targets)
        if loss.requires_grad:
            loss.backward()
        return [t.grad for t in tensors(output)]

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext()

    @contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._name_layer(error, index)
            raise

    def _name_layer(self, error: Exception, index: int) -> None:
        where = "the backward pass of all layers" if index == WHOLE else f"layer {index} ({self.names[index]})"
        error.add_note(f"in {where}, on a micro-batch of {len(self.batch)}")


def cut(value: Value) -> Value:
    """Detach from the history: the same storages, and what required a gradient is now a leaf that does."""
    return _cut(value) if isinstance(value, Tensor) else tuple(map(_cut, value))


def tensors(value: Value) -> list[Tensor]:
    """The tensors of what passes between two layers."""
    return [value] if isinstance(value, Tensor) else list(value)


def _run_backward(pairs: Iterable[tuple[Tensor, Tensor | None]], observer: Observer, index: int) -> None:
    """The backward pass from results on that have a gradient, if there are any."""
    known = [(result, grad) for result, grad in pairs if result.requires_grad and grad is not None]
    if known:
        with observer(index, "backward"):
            torch.autograd.backward([result for result, _ in known], [grad for _, grad in known])


def _cut(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _checked(value: Any) -> Value:
    if isinstance(value, Tensor) or (isinstance(value, tuple) and all(isinstance(t, Tensor) for t in value)):
        return value
    raise TypeError(f"gives a {type(value).__name__}: between layers there are tensors or tuples of tensors")


def _works_in_place(layer: nn.Module) -> bool:
    return any(getattr(module, "inplace", False) for module in layer.modules())


def _writable(value: Value) -> Value:
    return non_leaf(value) if isinstance(value, Tensor) else tuple(map(non_leaf, value))
