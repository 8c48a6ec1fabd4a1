"""The common base of all image classifiers: their task, their synthetic sample and their loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from harness.interfaces import Batch


class ClassificationModel:
    """Assigns a sample of `input_shape` to one of `classes`: logits (n, classes), targets (n,) of int64.

    Implements `harness.interfaces.Model` but for `layers`.
    """

    task = "classification"

    def __init__(self, name: str, input_shape: tuple[int, ...], classes: int) -> None:
        self.name = name
        self.input_shape = input_shape
        self.classes = classes

    def sample(self, n: int) -> Batch:
        """n samples of normal noise, each of a random class."""
        return Batch(torch.randn(n, *self.input_shape), torch.randint(self.classes, (n,)))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy, summed over the samples."""
        return functional.cross_entropy(output, target, reduction="sum")
