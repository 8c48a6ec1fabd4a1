"""What models of language share: the next token as the task, the head, and how weights begin."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.tasks import NextToken

DEVIATION = 0.02
"""Standard deviation of all weights at the beginning (GPT-2)."""


class LanguageModel(NextToken):
    """Predicts the next token for each of (n, sequence): logits (n, sequence, vocabulary).

    Implements `harness.interfaces.Model` but for `layers`.
    """

    def __init__(self, name: str, sequence: int, vocabulary: int) -> None:
        self.name, self.classes = name, vocabulary
        self.input_shape = (sequence,)


class Head(nn.Module):
    """(n, sequence, width) -> logits (n, sequence, vocabulary): a matmul with `weight`, without bias."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def embedding(vocabulary: int, width: int) -> nn.Embedding:
    """A table of normal weights."""
    return nn.Embedding.from_pretrained(normal(torch.empty(vocabulary, width)), freeze=False)


def head(table: nn.Embedding, tied: bool) -> Head:
    """The output head: with the very weight of the embedding, or one of its own, as large."""
    if tied:
        return Head(cast(nn.Parameter, table.weight))
    return Head(nn.Parameter(normal(torch.empty_like(table.weight))))


def linear(inputs: int, outputs: int, deviation: float = DEVIATION, bias: bool = True) -> nn.Linear:
    """A linear layer with normal weights and biases of 0."""
    layer = nn.Linear(inputs, outputs, bias)
    normal(layer.weight, deviation)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def normal(weight: Tensor, deviation: float = DEVIATION) -> Tensor:
    """Fills with normal numbers, and returns, `weight`. On the meta device there are none to draw, and torch would
    import its compiler to draw them, which takes seconds."""
    return weight if weight.is_meta else nn.init.normal_(weight, std=deviation)
