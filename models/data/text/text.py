"""Batches from the tokens of a text that is held in memory."""

from __future__ import annotations

import torch

from harness.interfaces import Batch, Model
from models.data.shuffled_epochs import Walk
from models.data.text.config import Config, load_corpus
from models.data.text.corpus import Corpus


class Text:
    """Implements `harness.interfaces.Data` for text.

        tokens     t0 t1 t2 t3 t4 | t5 t6 t7 t8 t9 | t10 ...      windows of length + 1 tokens; a rest is left out
        inputs     t0 t1 t2 t3    | t5 t6 t7 t8    |
        targets       t1 t2 t3 t4 |    t6 t7 t8 t9 |

    Steps walk through the windows epoch by epoch, each time in another order. Raises ValueError if the corpus has
    less than one window.
    """

    def __init__(self, corpus: Corpus, length: int, seed: int) -> None:
        count = len(corpus) // (length + 1)
        if not count:
            raise ValueError(f"{len(corpus)} tokens are less than a window of {length + 1}")
        self.corpus = corpus
        self.windows = torch.from_numpy(corpus.tokens[: count * (length + 1)]).view(count, length + 1)
        self._walk = Walk(count, seed)

    def batch(self, step: int, size: int) -> Batch:
        """Inputs and targets, both (size, length) of int64."""
        windows = self.windows[self._walk.chosen(step * size, size)].long()
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def build(config: Config, model: Model, seed: int) -> Text:
    """Raises `harness.core.problem.CannotRun` where the model does not fit."""
    return Text(load_corpus(config, model), model.input_shape[0], seed)
