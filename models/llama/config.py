"""The keys of `model=llama`."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.problem import Problem
from models.config_ranges import above_0, at_least, divides

SIZES = ("layers", "width", "heads", "kv_heads", "hidden", "sequence", "vocabulary")

TASK = "text"
"""The task that the model is trained for."""


@dataclass
class Config:
    """A decoder-only transformer with RMS norms, rotary embedding, grouped queries and gated linear units, no biases.
    The default is small: it learns English, byte by byte, on a laptop."""

    name: str = "llama"
    """The network: models/llama."""
    layers: int = 4
    """Number of transformer layers; the model has three more layers."""
    width: int = 64
    """Width of a token's embedding."""
    heads: int = 4
    """Number of attention heads; must divide width into an even number of features for each head."""
    kv_heads: int = 2
    """Number of heads of keys and values, each for as many neighbouring query heads; must divide heads."""
    hidden: int = 176
    """Width of the gated linear unit."""
    sequence: int = 64
    """Sequence length: tokens of a sample."""
    vocabulary: int = 256
    """Vocabulary size; 256 covers all bytes."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding's angles: pair k of a head's features turns by rope_theta^(-2 k / features) a
    token."""
    norm_eps: float = 1e-5
    """What RMS norms add to the mean of squares."""
    tied: bool = False
    """Share one weight between the embedding and the output head."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    wrong = [one for key in SIZES for one in at_least(config, key, 2 if key == "vocabulary" else 1)]
    wrong += divides(config, "heads", "width") or _even(config)
    wrong += divides(config, "kv_heads", "heads")
    for key in ("rope_theta", "norm_eps"):
        wrong += above_0(config, key)
    return wrong


def _even(config: Config) -> list[Problem]:
    """An odd number of features of a head, which no pairs make up."""
    if config.heads < 1 or config.width < 1 or config.width // config.heads % 2 == 0:
        return []
    message = f"is {config.width // config.heads} features for each of {config.heads} heads, must be an even number"
    return [Problem("model.width", config.width, message, ({"model.width": config.width + config.heads},))]
