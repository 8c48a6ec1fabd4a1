"""GPT with layer norm before each branch, as in GPT-2, as one sequence of layers.

    tokens (n, s) -> embedding -> position -> block_0 ... block_{l-1} -> norm -> head -> logits (n, s, V)
                     V h          s h         12 h^2 + 13 h each         2 h     V h, or the embedding's own

The l + 4 layers have l (12 h^2 + 13 h) + V h + s h + 2 h parameters with a tied head, V h more without. A tied head
holds the very parameter of the embedding: an engine that puts them on two devices gives each a copy, and each copy the
sum of both gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from harness.core.problem import refuse
from harness.nn.dropout import Dropout
from models.gpt.block import Block
from models.gpt.config import SIZES, Config, check
from models.language_model import LanguageModel, embedding, head, normal


class GPT(LanguageModel):
    """Predicts the next token for each of (n, sequence): logits (n, sequence, vocabulary).

    `name` says which one it is, as in "gpt_48_4512_24_512_51200" for its layers, hidden width, heads, sequence and
    vocabulary, with "_untied" at the end where the head has a weight of its own. Raises `CannotRun` that names each
    key of `config` whose number is impossible.
    """

    def __init__(self, config: Config) -> None:
        refuse(check(config), "model=gpt")
        self.config = config
        sizes = "_".join(str(getattr(config, key)) for key in SIZES)
        name = f"gpt_{sizes}" if config.tied else f"gpt_{sizes}_untied"
        super().__init__(name, config.sequence, config.vocabulary)

    def layers(self) -> nn.Sequential:
        """The l + 4 layers by name, freshly initialized; on the meta device they cost no memory."""
        return nn.Sequential(OrderedDict(_layers(self.config)))


class Position(nn.Module):
    """(n, sequence, hidden) -> the same, with a learned vector added for each place, then dropout."""

    def __init__(self, sequence: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(torch.empty(sequence, hidden)))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(x + self.weight)
        return dropped


def _layers(config: Config) -> Iterator[tuple[str, nn.Module]]:
    c = config
    tokens = embedding(c.vocabulary, c.hidden)
    yield "embedding", tokens
    yield "position", Position(c.sequence, c.hidden, c.dropout)
    for i in range(c.layers):
        yield f"block_{i}", Block(c.hidden, c.heads, c.layers, c.dropout, c.attention_dropout)
    yield "norm", nn.LayerNorm(c.hidden)
    yield "head", head(tokens, c.tied)


def build(config: Config) -> GPT:
    """The model; raises `CannotRun` that names each key whose number is impossible."""
    return GPT(config)
