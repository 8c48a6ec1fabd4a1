"""A module, or a wrapper, on the samples of a batch (inputs, targets) that the user has at hand.

What a plain module is trained for follows from the targets:

    whole numbers (n,)                           classification: cross entropy
    whole numbers (n, s), and so are the inputs  text: cross entropy of each token
    other numbers (n, ...)                       regression: squared error
    anything                                     what the user's own loss says (`Custom`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.interfaces import Batch
from harness.user_model.wrappers import Classifier, Custom, LanguageModel, OnExample, Regression, Wrapper


class OnBatch(OnExample):
    """The task of a wrapper, on the samples of a batch.

    `known`: whether the wrapper's classes are the user's own; else they are the fewest that the targets need, and the
    module may have more. Raises ValueError for a batch that is not one of the wrapper's.
    """

    def __init__(self, wrapper: Wrapper, batch: Batch, known: bool = True) -> None:
        super().__init__(wrapper.module, batch)
        self.task, self.classes = wrapper.task, wrapper.classes
        self._wrapper, self._known = wrapper, known
        if self.input_shape != wrapper.input_shape:
            expected = _shown(("n", *wrapper.input_shape))
            raise ValueError(f"has inputs of {_shown(batch.inputs.shape)}, a {self.kind} takes {expected}")
        if wrapper.classes:
            self._check_classes(batch.targets)

    @property
    def kind(self) -> str:
        """The name of the wrapper's class."""
        return type(self._wrapper).__name__

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The wrapper's."""
        return self._wrapper.loss(output, target)

    def output_shape_of(self, n: int) -> tuple[int, ...] | None:
        """The wrapper's; None if the number of classes is not known."""
        return self._wrapper.output_shape_of(n) if self._known else None

    def misfit(self, shape: tuple[int, ...]) -> str:
        """What is wrong with an output of this shape."""
        expected = self._wrapper.output_shape_of(shape[0]) if shape else None
        if self._known or expected is None or (shape[:-1] == expected[:-1] and shape[-1] >= expected[-1]):
            return ""
        least = _shown((*expected[:-1], f"{self.classes} or more"))
        return f"gives {_shown(shape)} for {expected[0]} samples, targets of 0 to {self.classes - 1} need {least}"

    def _check_classes(self, targets: Tensor) -> None:
        shape = (len(targets), *self.input_shape) if self.task == "text" else (len(targets),)
        if targets.dtype != torch.int64 or tuple(targets.shape) != shape:
            what = f"{targets.dtype} of {_shown(targets.shape)}".removeprefix("torch.")
            raise ValueError(f"has targets of {what}, a {self.kind} takes int64 of {_shown(shape)}")
        if not targets.is_meta and int(targets.max()) >= self.classes:
            largest, most = int(targets.max()), self.classes - 1
            raise ValueError(f"has a target of {largest}, a {self.kind} of {self.classes} classes takes 0 to {most}")


def wrapped(module: nn.Module, batch: Batch, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> Wrapper:
    """A plain module, trained for what the batch or the loss says. Raises ValueError if neither does."""
    inputs, targets = batch.inputs, batch.targets
    if loss is not None:
        return Custom(module, batch, loss)
    if targets.is_floating_point():
        return OnBatch(Regression(module, inputs.shape[1:], targets.shape[1:]), batch)
    if targets.dtype == torch.int64 and not targets.is_meta:
        least = max(int(targets.max()) + 1, 1)
        if targets.dim() == 1:
            return OnBatch(Classifier(module, inputs.shape[1:], least), batch, known=False)
        if targets.dim() == 2 and inputs.dtype == torch.int64 and inputs.shape == targets.shape:
            return OnBatch(LanguageModel(module, least, targets.shape[1]), batch, known=False)
    what = f"{targets.dtype} of {_shown(targets.shape)}".removeprefix("torch.")
    raise ValueError(f"has targets of {what}, which do not say what the module is trained for")


def as_batch(given: Any) -> Batch:
    """The batch of the user's tensors, detached and on the CPU. Raises TypeError and ValueError for anything else."""
    pair = (given.inputs, given.targets) if isinstance(given, Batch) else given
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"is {_article(given)}, it must be (inputs, targets), two tensors")
    for name, one in zip(("inputs", "targets"), pair, strict=True):
        if not isinstance(one, Tensor):
            raise TypeError(f"has {name} that are {_article(one)}, they must be a tensor of (samples, ...)")
        if not one.dim() or not len(one):
            raise ValueError(f"has {name} of {_shown(one.shape)}, they must be a tensor of (samples, ...)")
    if len(pair[0]) != len(pair[1]):
        raise ValueError(f"has {len(pair[0])} inputs and {len(pair[1])} targets")
    return Batch(*(one.detach() if one.is_meta else one.detach().cpu() for one in map(_whole, pair)))


def _whole(tensor: Tensor) -> Tensor:
    """Whole numbers as torch's losses and embeddings take them: int64."""
    whole = tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
    return tensor.long() if whole else tensor


def _article(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _shown(shape: Any) -> str:
    """(n, 3, 32)"""
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
