"""The keys of `model=gpt`."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.problem import Problem
from models.config_ranges import at_least, probability

SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary")

TASK = "text"
"""What it is trained for."""


@dataclass
class Config:
    """A decoder-only transformer. The default is small: it learns English, byte by byte, on a laptop."""

    name: str = "gpt"
    """The network: models/gpt."""
    layers: int = 4
    """Transformer layers; the chain has four more."""
    hidden: int = 64
    """Width of a token's embedding."""
    heads: int = 4
    """Attention heads; they divide hidden."""
    sequence: int = 64
    """Tokens of a sample."""
    vocabulary: int = 256
    """Different tokens; 256 are all bytes."""
    tied: bool = True
    """Whether the head's weight is the embedding's; otherwise it has its own."""
    dropout: float = 0.0
    """Probability that an element of the embedded tokens, or of what a layer adds to them, is zeroed in training."""
    attention_dropout: float = 0.0
    """The same for attention's probabilities. Above 0 they are stored whole, which takes much more memory."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    wrong = [one for key in SIZES for one in at_least(config, key, 2 if key == "vocabulary" else 1)]
    if config.hidden >= 1 and config.heads >= 1 and config.hidden % config.heads:
        fixes = tuple({"model.heads": heads} for heads in _nearest(config.heads, config.hidden))
        wrong.append(Problem("model.heads", config.heads, f"does not divide model.hidden {config.hidden}", fixes))
    for key in ("dropout", "attention_dropout"):
        wrong += probability(config, key, fix=0.1)
    return wrong


def _nearest(number: int, whole: int) -> list[int]:
    """The largest divisor of `whole` below `number`, and the smallest above it where there is one."""
    below = next(n for n in range(min(number, whole), 0, -1) if whole % n == 0)
    above = next((n for n in range(number, whole + 1) if whole % n == 0), None)
    return [below] if above is None else [below, above]
