"""Llama as one sequence of layers.

    tokens (n, s) -> embedding -> block_0 ... block_{l-1} -> norm -> head -> logits (n, s, V)
                     V w          see block.py               w       V w, or the embedding's own

A tied head holds the very parameter of the embedding, as that of `model=gpt`. Each block has rotary tables of its own,
s x d numbers for a head of d features, so that any blocks can be on any devices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from torch import nn

from harness.core.problem import refuse
from models.language_model import LanguageModel, embedding, head
from models.llama.block import Block
from models.llama.config import SIZES, Config, check


class Llama(LanguageModel):
    """Predicts the next token for each of (n, sequence): logits (n, sequence, vocabulary).

    `name` says which one it is, as in "llama_32_4096_32_8_14336_8192_128256" for its layers, width, heads, heads of
    keys, hidden width, sequence and vocabulary, with "_tied" at the end where the head has the embedding's weight.
    Raises `CannotRun` that names each key of `config` whose number is impossible.
    """

    def __init__(self, config: Config) -> None:
        refuse(check(config), "model=llama")
        self.config = config
        sizes = "_".join(str(getattr(config, key)) for key in SIZES)
        name = f"llama_{sizes}_tied" if config.tied else f"llama_{sizes}"
        super().__init__(name, config.sequence, config.vocabulary)

    def layers(self) -> nn.Sequential:
        """The l + 3 layers by name, freshly initialized; on the meta device they cost no memory."""
        return nn.Sequential(OrderedDict(_layers(self.config)))


def _layers(config: Config) -> Iterator[tuple[str, nn.Module]]:
    tokens = embedding(config.vocabulary, config.width)
    yield "embedding", tokens
    for i in range(config.layers):
        yield f"block_{i}", Block(config)
    yield "norm", nn.RMSNorm(config.width, config.norm_eps)
    yield "head", head(tokens, config.tied)


def build(config: Config) -> Llama:
    """The model; raises `CannotRun` that names each key whose number is impossible."""
    return Llama(config)
