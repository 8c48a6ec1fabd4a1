"""The keys of `model=gpt`."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.problem import Problem
from models.config_ranges import at_least, divides, probability

SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary")

TASK = "text"
"""The task that the model is trained for."""


@dataclass
class Config:
    """A decoder-only transformer. The default is small: it learns English, byte by byte, on a laptop."""

    name: str = "gpt"
    """The network: models/gpt."""
    layers: int = 4
    """Number of transformer layers; the model has four more layers."""
    hidden: int = 64
    """Hidden size: width of a token's embedding."""
    heads: int = 4
    """Number of attention heads; must divide hidden."""
    sequence: int = 64
    """Sequence length: tokens of a sample."""
    vocabulary: int = 256
    """Vocabulary size; 256 covers all bytes."""
    tied: bool = True
    """Share one weight between the embedding and the output head."""
    dropout: float = 0.0
    """Dropout probability of embeddings and of each layer's output."""
    attention_dropout: float = 0.0
    """Dropout probability of attention weights. Above 0 attention stores them, which takes much more memory."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    wrong = [one for key in SIZES for one in at_least(config, key, 2 if key == "vocabulary" else 1)]
    wrong += divides(config, "heads", "hidden")
    for key in ("dropout", "attention_dropout"):
        wrong += probability(config, key, fix=0.1)
    return wrong
