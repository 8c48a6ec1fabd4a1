"""What networks of Transformers learn: their inputs, targets and losses, one class for each task.

task      inputs                        targets                       the loss of a sample is the mean over
causal    tokens (n, s)                 the next tokens (n, s)        its tokens
masked    tokens (n, s), some hidden    the hidden ones, else -100    its hidden tokens
seq2seq   source, target (n, 2, s)      the next target tokens (n, s) its target tokens
image     (n, channels, side, side)     classes (n,)                  the image
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.interfaces import Batch
from harness.tasks import Classification, NextToken

IGNORED = -100
"""Target of a token that has no part in the loss; the number of Transformers."""
HIDDEN_SHARE = 0.15
"""Share of tokens that are hidden (BERT, 3.1)."""


class Causal(NextToken):
    """Predicts the next token at each place. `settings` is a configuration object of Transformers."""

    def __init__(self, settings: Any, sequence: int) -> None:
        self.input_shape = (sequence,)
        self.classes = int(settings.vocab_size)

    def logits(self, network: nn.Module, inputs: Tensor) -> Tensor:
        """Returns what the network gives for each place and class."""
        found: Tensor = network(input_ids=inputs, use_cache=False).logits
        return found


class Masked(Causal):
    """Predicts tokens in whose places the last token of the vocabulary stands; at least one in each sample."""

    task = "masked text"

    def logits(self, network: nn.Module, inputs: Tensor) -> Tensor:
        """As `Causal.logits`, of a network that has no cache."""
        found: Tensor = network(input_ids=inputs).logits
        return found

    def sample(self, n: int) -> Batch:
        """n samples of random tokens."""
        tokens = torch.randint(self.classes - 1, (n, *self.input_shape))
        hidden = torch.rand(tokens.shape) < HIDDEN_SHARE
        hidden[:, 0] |= ~hidden.any(1)
        return Batch(tokens.masked_fill(hidden, self.classes - 1), tokens.masked_fill(~hidden, IGNORED))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy in nats: the mean over a sample's hidden tokens, summed over the samples."""
        each = functional.cross_entropy(output.transpose(1, 2), target, reduction="none", ignore_index=IGNORED)
        return (each.sum(1) / (target != IGNORED).sum(1)).sum()


class Seq2Seq(Causal):
    """Predicts the next token of a target sequence, from a source sequence and the target so far."""

    task = "translation"

    def __init__(self, settings: Any, sequence: int) -> None:
        super().__init__(settings, sequence)
        self.input_shape = (2, sequence)

    def logits(self, network: nn.Module, inputs: Tensor) -> Tensor:
        """As `Causal.logits`, of source and target."""
        found: Tensor = network(input_ids=inputs[:, 0], decoder_input_ids=inputs[:, 1], use_cache=False).logits
        return found

    def sample(self, n: int) -> Batch:
        """n samples of random tokens."""
        source = torch.randint(self.classes, (n, self.input_shape[-1]))
        tokens = torch.randint(self.classes, (n, self.input_shape[-1] + 1))
        return Batch(torch.stack([source, tokens[:, :-1]], 1), tokens[:, 1:].clone())


class Image(Classification):
    """Assigns an image to one of `num_labels` classes."""

    def __init__(self, settings: Any, sequence: int) -> None:
        side = settings.image_size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        self.input_shape = (int(settings.num_channels), int(height), int(width))
        self.classes = int(settings.num_labels)

    def logits(self, network: nn.Module, inputs: Tensor) -> Tensor:
        """Returns (n, classes)."""
        found: Tensor = network(pixel_values=inputs).logits
        return found


TASKS: dict[str, type[Causal | Image]] = {"causal": Causal, "masked": Masked, "seq2seq": Seq2Seq, "image": Image}
"""The class of each task in `models.hf.config.TASKS`."""
