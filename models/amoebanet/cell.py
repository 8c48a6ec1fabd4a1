"""A cell of AmoebaNet-D: five sums of two operations each, on what came before.

    s1  output of the last cell     --ReLU, 1 x 1, norm-------------->  state 0  \
    s2  output of the one before    --as it is, or made to match s1-->  state 1   > states 2 .. 6, one after another
                                                                                 /
    (s1, s2)  ->  (some of the states side by side, s1)

State 0 is of the last cell and state 1 of the one before it: the other way round than in NASNet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.amoebanet.operations import (
    FactorizedReduction,
    average_3x3,
    convolution,
    convolution_1x1,
    convolution_1x7_7x1,
    convolution_3x3,
    identity,
    max_2x2,
    max_3x3,
)

Term = tuple[Callable[[int, int], nn.Module], int]
"""An operation, made from its channels and its stride, and the state that it works on."""


@dataclass(frozen=True)
class Kind:
    """Wiring of a cell: `sums[k]` makes state k + 2, `joined` are the states that are concatenated in the output.

    `stride` is that of the operations on states 0 and 1.
    """

    sums: tuple[tuple[Term, Term], ...]
    joined: tuple[int, ...]
    stride: int


NORMAL = Kind(
    sums=(
        ((convolution_1x1, 1), (max_3x3, 1)),
        ((identity, 1), (convolution_1x7_7x1, 0)),
        ((convolution_1x1, 0), (convolution_1x7_7x1, 0)),
        ((max_3x3, 2), (identity, 2)),
        ((average_3x3, 1), (convolution_1x1, 5)),
    ),
    joined=(0, 3, 4, 6),
    stride=1,
)
"""Keeps the side, gives 4 c channels. It joins the states that no sum takes, as the authors' code and GPipe do; the
AmoebaNet paper's drawing has 4, 5 and 6, and other parameter counts than are published."""

REDUCTION = Kind(
    sums=(
        ((max_2x2, 0), (max_3x3, 0)),
        ((identity, 2), (convolution_3x3, 1)),
        ((convolution_1x7_7x1, 2), (max_3x3, 2)),
        ((identity, 3), (max_2x2, 1)),
        ((average_3x3, 2), (convolution_1x1, 3)),
    ),
    joined=(4, 5, 6),
    stride=2,
)
"""Halves the side, gives 3 c channels."""


class Cell(nn.Module):
    """(s1, s2) -> (joined states, s1); a single tensor, before the first cell, is both s1 and s2.

    `channels` is c; s1 has `last` channels, s2 has `earlier`. After a reduction cell s2 has twice the side of s1.
    """

    def __init__(self, kind: Kind, channels: int, last: int, earlier: int, after_reduction: bool) -> None:
        super().__init__()
        self.kind = kind
        self.state_0 = nn.Sequential(*convolution(last, channels))
        self.state_1 = _matching(earlier, channels, after_reduction)
        self.operations = nn.ModuleList(
            make(channels, kind.stride if state < 2 else 1) for sum_ in kind.sums for make, state in sum_
        )

    def forward(self, value: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        s1, s2 = (value, value) if isinstance(value, Tensor) else value
        states: list[Tensor] = [self.state_0(s1), self.state_1(s2)]
        operations = iter(self.operations)
        for (_, left), (_, right) in self.kind.sums:
            states.append(next(operations)(states[left]) + next(operations)(states[right]))
        return torch.cat([states[state] for state in self.kind.joined], dim=1), s1


def _matching(inside: int, channels: int, after_reduction: bool) -> nn.Module:
    """Brings s2 to `channels` channels and the side of s1, with parameters only where it has others."""
    if after_reduction:
        return FactorizedReduction(inside, channels)
    return nn.Identity() if inside == channels else nn.Sequential(*convolution(inside, channels))
