"""A transformer layer. Each of its two branches has its RMS norm at its head, and nothing has a bias.

    x -+-> attention_norm -> query, key, value -> rotary -> attention -> projection -> + ->
       +------------------------------------------------------------------------------+
      -+-> mlp_norm -+-> gate -> SiLU -> x -> down -----------------------------------> + -> x
       |             +-> up -------------'                                              |
       +--------------------------------------------------------------------------------+

For a width w, a head of d features and k heads of keys the branches have 2 w^2 + 2 w k d and 3 w `hidden` parameters,
each norm w.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.nn.skip import Sum
from models.language_model import DEVIATION, linear
from models.llama.config import Config


class Block(nn.Module):
    """(n, sequence, width) -> the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.attention_sum = Sum()
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config)
        self.mlp_sum = Sum()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_sum(x, self.attention(self.attention_norm(x)))
        x = self.mlp_sum(x, self.mlp(self.mlp_norm(x)))
        return x


class Attention(nn.Module):
    """Causal attention, where a head of keys and values serves a group of neighbouring heads of queries (GQA)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.width = config.width // config.heads
        self.query = linear(config.width, config.width, bias=False)
        self.key = linear(config.width, config.kv_heads * self.width, bias=False)
        self.value = linear(config.width, config.kv_heads * self.width, bias=False)
        self.rotary = Rotary(config.sequence, self.width, config.rope_theta)
        self.projection = linear(config.width, config.width, DEVIATION / sqrt(2 * config.layers), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query(x), self.key(x), self.value(x)
        # (n, heads, sequence, head's width); an engine may hold some of the heads only
        query, key, value = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        query, key = self.rotary(query), self.rotary(key)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        joined: Tensor = self.projection(seen.transpose(1, 2).flatten(2))
        return joined


class Rotary(nn.Module):
    """Turns each pair of neighbouring features of (n, heads, sequence, width) by an angle that grows with the place.

    It is a multiplication of complex numbers: at place p that of pair k is exp(i p theta^(-2 k / width)). The tables
    are in no state dict. They begin in float64, so that they are rounded once, to the dtype that a model gets.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, sequence: int, width: int, theta: float) -> None:
        super().__init__()
        turns = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(sequence, dtype=torch.float64), turns)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cosines, sines = self.cosines.to(x.dtype), self.sines.to(x.dtype)
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = real * cosines - imaginary * sines, real * sines + imaginary * cosines
        return torch.stack(turned, -1).flatten(-2)


class GatedMLP(nn.Module):
    """SwiGLU: the product of two linear layers, one of them through SiLU, then a third one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = linear(config.width, config.hidden, bias=False)
        self.up = linear(config.width, config.hidden, bias=False)
        self.down = linear(config.hidden, config.width, DEVIATION / sqrt(2 * config.layers), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return down
