"""A transformer layer, and how its weights begin. Each of its two branches has its layer norm at its head.

    x -+-> attention_norm -> qkv -> attention -> projection -> dropout -> + ->
       +------------------------------------------------------------------+
      -+-> mlp_norm -> up -> GELU -> down -> dropout ---------------------> + -> x
       +--------------------------------------------------------------------+

h is the model's width; a branch has 4 h^2 + 4 h and 8 h^2 + 5 h parameters, each norm 2 h.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.nn.dropout import Dropout
from harness.nn.skip import Sum
from models.language_model import DEVIATION, linear


class Block(nn.Module):
    """(n, sequence, hidden) -> the same shape. `depth`, the layers of the whole model, scales the first weights."""

    def __init__(self, hidden: int, heads: int, depth: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, depth, dropout, attention_dropout)
        self.attention_sum = Sum()
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, depth, dropout)
        self.mlp_sum = Sum()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_sum(x, self.attention(self.attention_norm(x)))
        x = self.mlp_sum(x, self.mlp(self.mlp_norm(x)))
        return x


class Attention(nn.Module):
    """Causal multi-head attention, with queries, keys and values from one matmul."""

    def __init__(self, hidden: int, heads: int, depth: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.width = hidden // heads
        self.qkv = linear(hidden, 3 * hidden)
        self.probability_dropout = Dropout(attention_dropout) if attention_dropout else None
        self.projection = linear(hidden, hidden, DEVIATION / sqrt(2 * depth))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, -1, self.width))  # an engine may hold some of the heads only
        query, key, value = (part.transpose(1, 2) for part in split.unbind(2))  # (n, heads, sequence, head's width)
        if self.probability_dropout is None:
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            seen = attend(query, key, value, self.probability_dropout)
        joined = self.projection(seen.transpose(1, 2).flatten(2))
        dropped: Tensor = self.dropout(joined)
        return dropped


class MLP(nn.Module):
    """Two linear layers with GELU between them, four times as wide there."""

    def __init__(self, hidden: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.up = linear(hidden, 4 * hidden)
        self.down = linear(4 * hidden, hidden, DEVIATION / sqrt(2 * depth))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self.down(functional.gelu(self.up(x))))
        return dropped


def attend(query: Tensor, key: Tensor, value: Tensor, dropout: Dropout) -> Tensor:
    """Causal attention whose probabilities go through `dropout`; all tensors are (n, heads, sequence, width)."""
    sequence, width = query.shape[-2:]
    later = torch.ones(sequence, sequence, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-2, -1) / sqrt(width)).masked_fill(later, float("-inf"))
    attended: Tensor = dropout(scores.softmax(-1)) @ value
    return attended
