"""What a module is trained on, around it: its input, its target and its loss. `from harness import Classifier`.

    Classifier      (n, *input_shape)   ->  logits (n, classes)                cross entropy
    LanguageModel   tokens (n, s)       ->  logits (n, s, vocabulary)          cross entropy of the next token
    Regression      (n, *input_shape)   ->  (n, *output_shape)                 mean squared error
    Custom          as the example      ->  anything                           the user's own loss

Of a result with more than logits, as networks of Hugging Face and googlenet give it, all but Custom take its `logits`.

A wrapper has all of `harness.interfaces.Model` but `name` and `layers`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.capture.structure import Ref, built, flat, leaves, places, template, tensors
from harness.interfaces import Batch
from harness.runtime.values import mapped, tensors_of
from harness.tasks import Classification, NextToken
from harness.user_model.module_forms import unwrapped

FEW = 2
"""Samples of a call that shows what a module does."""


class Wrapper(ABC):
    """A module with what it is trained on. Raises TypeError and ValueError for arguments that cannot be meant."""

    task: str
    input_shape: tuple[int, ...] = ()
    classes: int = 0
    target_form: Any = Ref(0)
    """How the tensors of the targets are nested in what the loss gets."""

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{type(self).__name__} takes an nn.Module, it got {type(module).__name__}: {module!r:.80}")
        self.module = unwrapped(module)

    @abstractmethod
    def sample(self, n: int) -> Batch:
        """n synthetic samples, drawn from torch's random generator on the current default device."""

    @abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """The sum of the samples' losses."""

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is called with, for a few samples: arguments and keyword arguments."""
        return (self.sample(FEW).inputs,), {}

    def select(self, result: Any) -> Any:
        """The part of the module's result that the loss takes: its logits, if it has other values, too."""
        return getattr(result, "logits", result)

    def output_shape_of(self, n: int) -> tuple[int, ...] | None:
        """The shape that the module must give for n samples; None if only the loss knows."""
        return None

    def constant_inputs(self) -> str:
        """The tensors that are the same in each call, with their shapes: "inputs['mask'] of (8, 8)"."""
        return ""


class Classifier(Classification, Wrapper):
    """Assigns a sample of `input_shape` to one of `classes`: the module gives logits (n, classes)."""

    def __init__(self, module: nn.Module, input_shape: Sequence[int], classes: int) -> None:
        super().__init__(module)
        self.input_shape = _shape("input_shape", input_shape)
        self.classes = _number("classes", classes)

    def output_shape_of(self, n: int) -> tuple[int, ...]:
        return (n, self.classes)


class LanguageModel(NextToken, Wrapper):
    """Predicts the next of each of `sequence` tokens: (n, sequence) of int64 in, logits (n, sequence, vocabulary) out.

    Whether a place sees those after it is the module's own matter.
    """

    def __init__(self, module: nn.Module, vocabulary: int, sequence: int) -> None:
        super().__init__(module)
        self.classes = _number("vocabulary", vocabulary)
        self.input_shape = (_number("sequence", sequence),)

    def output_shape_of(self, n: int) -> tuple[int, ...]:
        return (n, *self.input_shape, self.classes)


class Regression(Wrapper):
    """Predicts numbers of `output_shape` for a sample of `input_shape`."""

    task = "regression"

    def __init__(self, module: nn.Module, input_shape: Sequence[int], output_shape: Sequence[int]) -> None:
        super().__init__(module)
        self.input_shape = _shape("input_shape", input_shape)
        self.output_shape = _shape("output_shape", output_shape)

    def sample(self, n: int) -> Batch:
        """n samples and targets of normal noise."""
        return Batch(torch.randn(n, *self.input_shape), torch.randn(n, *self.output_shape))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Squared error: the mean over a sample's numbers, summed over the samples."""
        return (output - target).square().reshape(len(output), -1).mean(1).sum()

    def output_shape_of(self, n: int) -> tuple[int, ...]:
        return (n, *self.output_shape)


class OnExample(Wrapper):
    """A module on the samples of an example, (inputs, targets). n samples are its own, over and over.

    inputs                  the module is called with
    a tensor                module(inputs)
    a tuple or list         module(*inputs)
    a dictionary            module(**inputs)

    Inputs may be nested. Tensors whose first size is the number of samples are inputs; all else, as a mask for all
    samples, an option or None, is the same in each call. The first tensor must have the samples. Targets may be nested,
    too: each of their tensors has the samples.
    """

    def __init__(self, module: nn.Module, example_batch: Batch | tuple[Any, Any]) -> None:
        super().__init__(module)
        inputs, targets = vars(example_batch).values() if isinstance(example_batch, Batch) else example_batch
        given, wanted = tensors(inputs), tensors(targets)
        first = [("inputs", given[0] if given else inputs), *(("targets", one) for one in wanted or [targets])]
        for name, tensor in first:
            if not isinstance(tensor, Tensor) or not tensor.dim() or not len(tensor):
                raise TypeError(f"the {name} of example_batch must be a tensor of (samples, ...), got {tensor!r:.80}")
        samples = len(given[0])
        if isinstance(targets, list | tuple) and len(targets) == samples and not isinstance(targets[0], Tensor):
            message = f"the targets of example_batch are {samples} of {type(targets[0]).__name__}, one for each sample"
            raise TypeError(f"{message}: they must be tensors of (samples, ...), as torch.stack makes them")
        if other := [len(target) for target in wanted if len(target) != samples]:
            counts = f"{samples} inputs and {other[0]} targets"
            raise ValueError(f"example_batch has {counts}: the first tensor of the inputs must have the samples")
        own = [tensor for tensor in given if tensor.dim() and len(tensor) == samples]
        self._form, self.target_form = _numbered(inputs, own), _numbered(targets, wanted)
        self.example = Batch(flat(own), flat(wanted))
        self.input_shape = tuple(given[0].shape[1:])

    @property
    def without_values(self) -> bool:
        """Whether tensors of the example are on the meta device."""
        shared = [leaf for leaf in leaves(self._form) if isinstance(leaf, Tensor)]
        return any(tensor.is_meta for tensor in (*tensors(self.example), *shared))

    def sample(self, n: int) -> Batch:
        """The samples of the example in turn, n in all."""
        device = torch.get_default_device()

        def chosen(tensor: Tensor) -> Tensor:
            return tensor[torch.arange(n, device=tensor.device) % len(tensor)].to(device)

        return Batch(mapped(chosen, self.example.inputs), mapped(chosen, self.example.targets))

    def constant_inputs(self) -> str:
        found = [(path, leaf) for path, leaf in places(self._form, "inputs") if isinstance(leaf, Tensor)]
        return ", ".join(f"{path} of {tuple(leaf.shape)}" for path, leaf in found)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of as many samples as no other tensor of the inputs has: those are known by their number."""
        device = torch.get_default_device()
        shared = {len(leaf) for leaf in leaves(self._form) if isinstance(leaf, Tensor) and leaf.dim()}
        own = tensors_of(self.sample(next(n for n in itertools.count(FEW) if n not in shared)).inputs)

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return own[leaf.number]
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        inputs = built(self._form, value)
        if isinstance(inputs, dict):
            return (), inputs
        return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


class Custom(OnExample):
    """A module with a loss of the user's own: `loss(output, targets)` returns one loss for each sample, or their sum.

    It is trained on samples like those of an example, (inputs, targets); a tuple of inputs is the arguments of the
    module, a dictionary its keyword arguments (`OnExample`). `output` is all that the module gives, a dictionary or a
    dataclass, too; `targets` are nested as in the example.
    """

    task = "custom"

    def __init__(
        self,
        module: nn.Module,
        example_batch: Batch | tuple[Any, Any],
        loss: Callable[[Any, Any], Tensor],
    ) -> None:
        super().__init__(module, example_batch)
        if not callable(loss):
            raise TypeError(f"loss must be a function of (output, targets), got {loss!r:.80}")
        self._loss = loss

    def select(self, result: Any) -> Any:
        return result

    def loss(self, output: Any, target: Any) -> Tensor:
        given = tensors(target)
        targets = built(self.target_form, lambda leaf: given[leaf.number] if isinstance(leaf, Ref) else leaf)
        found: Any = self._loss(output, targets)
        if not isinstance(found, Tensor):
            raise TypeError(f"loss must return a tensor, one number for each sample or their sum, got {found!r:.80}")
        return found.sum()


def _numbered(value: Any, own: Sequence[Tensor]) -> Any:
    """A template of the value, with numbers for these tensors."""
    numbers = {id(tensor): number for number, tensor in enumerate(own)}
    return template(value, lambda leaf: Ref(numbers[id(leaf)]) if id(leaf) in numbers else leaf)


def _shape(name: str, value: Sequence[int]) -> tuple[int, ...]:
    if isinstance(value, int):
        raise TypeError(f"{name} must be a shape, as ({value},), got {value}")
    return tuple(_number(name, one) for one in value)


def _number(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be whole numbers of at least 1, got {value!r}")
    return value
