"""The tokens of a text as numbers: its bytes, or its words by falling frequency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.data.text import source

END_OF_LINE = "<eos>"
BYTES = 256
PART = 1 << 22
"""Number of tokens that are counted at once."""


@dataclass(frozen=True)
class Corpus:
    """n tokens, (n,) of uint8 (bytes) or int32 (words); each is below `vocabulary`."""

    tokens: NDArray[np.uint8] | NDArray[np.int32]
    vocabulary: int

    def __len__(self) -> int:
        return len(self.tokens)

    def unigram_entropy(self) -> float:
        """Nats per token of a model that knows how often each token comes, and nothing of what is before it."""
        counts = _counts(self.tokens, self.vocabulary)
        share = counts[counts > 0] / len(self.tokens)
        return float(-(share * np.log(share)).sum())


def read(file: str | None, tokens: str) -> Corpus:
    """The corpus of `file`, or of the default text where it is null. `tokens`: "bytes" or "words".

    A word is what white space separates; the end of each line, of the last one too, is the token <eos>. Words are
    numbered by falling frequency, those that are equally frequent in the order of their first appearance.

    100 million words take about 30 s and 1 GB. Raises `harness.core.problem.CannotRun` for a file that cannot be used.
    """
    return _words(file) if tokens == "words" else _bytes(file)


def _bytes(file: str | None) -> Corpus:
    return Corpus(np.frombuffer(bytearray().join(source.blocks(file)), np.uint8), BYTES)


def _words(file: str | None) -> Corpus:
    """Read a file once: words get numbers as they appear, which are then sorted by frequency."""
    seen: defaultdict[str, int] = defaultdict()
    seen.default_factory = seen.__len__
    parts = [np.fromiter(map(seen.__getitem__, words), np.int32, len(words)) for words in _split(file)]
    appeared = np.concatenate(parts)
    del parts
    order = np.argsort(-_counts(appeared, len(seen)), kind="stable")
    number = np.empty(len(seen), np.int32)
    number[order] = np.arange(len(seen), dtype=np.int32)
    return Corpus(number[appeared], len(seen))


def _split(file: str | None) -> Iterator[list[str]]:
    """The words of the text, a block at a time."""
    partial = ""  # the last word of a block may continue in the next one
    last = "\n"
    for text in source.decoded(file):
        words = (partial + text).replace("\n", f" {END_OF_LINE} ").split()
        last = text[-1:] or last
        partial = words.pop() if words and not last.isspace() else ""
        yield words
    yield [partial] * bool(partial) + [END_OF_LINE] * (last != "\n")


def _counts(tokens: NDArray[np.uint8] | NDArray[np.int32], vocabulary: int) -> NDArray[np.int64]:
    """Count each token, part by part: numpy's bincount makes a copy of 8 bytes a token."""
    counts = np.zeros(vocabulary, np.int64)
    for first in range(0, len(tokens), PART):
        counts += np.bincount(tokens[first : first + PART], minlength=vocabulary)
    return counts
