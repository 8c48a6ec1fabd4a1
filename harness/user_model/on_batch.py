"""What a script gives as a model and a batch, as one object that trains on the samples of the batch.

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

from harness.capture.structure import Ref, built, template, tensors
from harness.core.problem import Problem, refuse
from harness.interfaces import Batch
from harness.user_model.plugin import EXAMPLES, has_interface
from harness.user_model.wrappers import Classifier, Custom, LanguageModel, OnExample, Regression, Wrapper

Loss = Callable[[Any, Any], Tensor]
Pair = tuple[Any, Any]
"""Inputs and targets, each a tensor or nested ones."""
ALONE = "is a module alone: what are its input, its target and its loss?"


def on_batch(model: Any, batch: Any, loss: Loss | None = None, named: bool = False) -> Any:
    """The model on the samples of a batch; the model itself if no batch is given.

    `named`: keys name the task, which is that of a plain module without a batch. Raises CannotRun for arguments of
    which no model can be made.
    """
    refuse(_misused(model, batch, loss, named))
    if batch is None:
        return model
    try:
        pair = _pair(batch)
        return OnBatch(model, pair) if isinstance(model, Wrapper) else _wrapped(model, pair, loss)
    except (TypeError, ValueError) as error:
        refuse([Problem("batch", None, str(error))])


class OnBatch(OnExample):
    """The task of a wrapper, on the samples of a batch.

    `known`: whether the wrapper's classes are the user's own; else they are the fewest that the targets need, and the
    module may have more. Raises ValueError for a batch that is not one of the wrapper's.
    """

    def __init__(self, wrapper: Wrapper, batch: Pair, known: bool = True) -> None:
        super().__init__(wrapper.module, batch)
        self.task, self.classes = wrapper.task, wrapper.classes
        self._wrapper, self._known = wrapper, known
        if self.input_shape != wrapper.input_shape:
            expected = _shown(("n", *wrapper.input_shape))
            found = _shown((len(self.example), *self.input_shape))
            raise ValueError(f"has inputs of {found}, {_a(wrapper)} takes {expected}")
        if self.target_form != wrapper.target_form:
            expected = "one tensor" if wrapper.target_form == Ref(0) else "others"
            raise ValueError(f"has targets that are {_a(batch[1])}, {_a(wrapper)} takes {expected}")
        if isinstance(self.example.targets, Tensor) and wrapper.classes:
            self._check_classes(self.example.targets)

    def loss(self, output: Any, target: Any) -> Tensor:
        """The wrapper's. Raises ValueError for logits that the targets do not fit."""
        if not self._known:
            self._check_logits(output)
        return self._wrapper.loss(output, target)

    def select(self, result: Any) -> Any:
        """The wrapper's."""
        return self._wrapper.select(result)

    def output_shape_of(self, n: int) -> tuple[int, ...] | None:
        """The wrapper's; None if the number of classes is not known."""
        return self._wrapper.output_shape_of(n) if self._known else None

    def _check_logits(self, output: Tensor) -> None:
        *expected, least = self._wrapper.output_shape_of(len(output)) or ()
        if list(output.shape[:-1]) != expected or output.shape[-1] < least:
            needed = _shown((*expected, f"{least} or more"))
            raise ValueError(f"targets of 0 to {least - 1} need an output of {needed}, it is {_shown(output.shape)}")

    def _check_classes(self, targets: Tensor) -> None:
        shape = (len(targets), *self.input_shape) if self.task == "text" else (len(targets),)
        if targets.dtype != torch.int64 or tuple(targets.shape) != shape:
            raise ValueError(
                f"has targets of {_described(targets)}, {_a(self._wrapper)} takes int64 of {_shown(shape)}"
            )
        if not targets.is_meta and not 0 <= int(targets.min()) <= int(targets.max()) < self.classes:
            found, most = f"{int(targets.min())} to {int(targets.max())}", self.classes - 1
            raise ValueError(f"has targets of {found}, {_a(self._wrapper)} of {self.classes} classes takes 0 to {most}")


def _misused(model: Any, batch: Any, loss: Loss | None, named: bool) -> list[Problem]:
    """What is wrong with the arguments together, whatever the batch is."""
    kind = type(model).__name__
    if isinstance(model, type):
        return [Problem("model", model.__name__, "is a class, not a module", hint=f"{model.__name__}(...)")]
    if named and batch is not None:
        return [Problem("model.task", None, "is given, and so is a batch, which says what it is trained on")]
    if isinstance(model, Wrapper):
        return [Problem("loss", None, f"is given, {_a(model)} has its own")] if loss else []
    if has_interface(model):
        given = [name for name, one in (("batch", batch), ("loss", loss)) if one is not None]
        return [Problem(name, None, f"is given, {_a(model)} has its own") for name in given]
    if not isinstance(model, nn.Module):
        hint = f"an nn.Module, the name of a model, or {EXAMPLES['classification']}"
        return [Problem("model", kind, "is no model", hint=hint)]
    if batch is None and not named:
        return [Problem("model", kind, ALONE, hint=f"a batch, (inputs, targets), or {EXAMPLES['classification']}")]
    return [Problem("loss", None, "needs a batch", hint="(inputs, targets)")] if loss and batch is None else []


def _wrapped(module: nn.Module, batch: Pair, loss: Loss | None) -> Wrapper:
    """A plain module, trained for what the batch or the loss says. Raises ValueError if neither does."""
    if loss is not None:
        return Custom(module, batch, loss)
    inputs, targets = tensors(batch[0])[0], batch[1]
    alone = isinstance(targets, Tensor)
    if alone and targets.is_floating_point():
        return OnBatch(Regression(module, inputs.shape[1:], targets.shape[1:]), batch)
    if alone and targets.dtype == torch.int64 and not targets.is_meta:
        least = max(int(targets.max()) + 1, 1)
        if targets.dim() == 1:
            return OnBatch(Classifier(module, inputs.shape[1:], least), batch, known=False)
        if targets.dim() == 2 and inputs.dtype == torch.int64 and inputs.shape == targets.shape:
            return OnBatch(LanguageModel(module, least, targets.shape[1]), batch, known=False)
    what = f"of {_described(targets)}, which do" if alone else f"that are {_a(targets)}, which does"
    message = f"has targets {what} not say what the module is trained for: give loss=, a function of (output, targets)"
    raise ValueError(message)


def _pair(given: Any) -> Pair:
    """The batch of the user's tensors, detached and on the CPU. Raises TypeError and ValueError for anything else."""
    pair = (given.inputs, given.targets) if isinstance(given, Batch) else given
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"is {_a(given)}, it must be (inputs, targets)")
    inputs, targets = pair
    first: Any = next(iter(tensors(inputs)), inputs)
    wanted: list[Any] = tensors(targets) or [targets]
    for name, one in (("inputs", first), *(("targets", one) for one in wanted)):
        if not isinstance(one, Tensor):
            raise TypeError(f"has {name} that are {_a(one)}, they must be a tensor of (samples, ...)")
        if not one.dim() or not len(one):
            raise ValueError(f"has {name} of {_shown(one.shape)}, they must be a tensor of (samples, ...)")
    if other := [len(one) for one in wanted if len(one) != len(first)]:
        raise ValueError(f"has {len(first)} inputs and {other[0]} targets")
    inputs, targets = (built(template(value, _own), lambda leaf: leaf) for value in pair)
    return inputs, targets


def _own(value: Any) -> Any:
    """A tensor without its history, on the CPU; whole numbers as torch's losses and embeddings take them: int64."""
    if not isinstance(value, Tensor):
        return value
    whole = value.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
    value = value.detach().long() if whole else value.detach()
    return value if value.is_meta else value.cpu()


def _a(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of {_shown(tensor.shape)}".removeprefix("torch.")


def _shown(shape: Any) -> str:
    """(n, 3, 32)"""
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
