"""What models are trained for, as parts of a `harness.interfaces.Model`: their synthetic samples and their losses.

Classification   (n, *input_shape)        ->  logits (n, classes)
NextToken        tokens (n, sequence)     ->  logits (n, sequence, vocabulary)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from harness.interfaces import Batch


class Classification:
    """Assigns a sample of `input_shape` to one of `classes`: logits (n, classes), targets (n,) of int64."""

    task = "classification"
    input_shape: tuple[int, ...]
    classes: int

    def sample(self, n: int) -> Batch:
        """n samples of normal noise, each of a random class."""
        return Batch(torch.randn(n, *self.input_shape), torch.randint(self.classes, (n,)))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy in nats, summed over the samples."""
        return functional.cross_entropy(_wide(output), target, reduction="sum")


class NextToken:
    """Predicts the next of each of the tokens of a sample, `input_shape` is (sequence,): logits (n, sequence, classes),
    targets (n, sequence) of int64. The classes are the vocabulary."""

    task = "text"
    input_shape: tuple[int, ...]
    classes: int

    def sample(self, n: int) -> Batch:
        """n sequences of random tokens, int64 (n, sequence); the targets are the same one token later."""
        tokens = torch.randint(self.classes, (n, self.input_shape[-1] + 1))
        return Batch(tokens[:, :-1].clone(), tokens[:, 1:].clone())

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy in nats: the mean over a sample's tokens, summed over the samples."""
        total = functional.cross_entropy(_wide(output).flatten(0, 1), target.flatten(), reduction="sum")
        return total / target.shape[1]


def _wide(output: Tensor) -> Tensor:
    """What a loss sums up: in float16 a sum over many samples, or times a loss scale, would overflow."""
    return output.float() if output.dtype == torch.float16 else output
