"""The keys of `data=text`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.core.problem import CannotRun, Problem, refuse
from harness.core.value_checks import one_of
from harness.interfaces import Model
from models.data.text import source

if TYPE_CHECKING:
    from models.data.text.corpus import Corpus

TOKENS = ("bytes", "words")
BYTES = 256


@dataclass
class Config:
    """A real text: the help that ships with Python, or the user's own file."""

    name: str = "text"
    """The data set: models/data/text."""
    file: str | None = None
    """Text file; null: the topics of Python's own help, half a million characters of English."""
    tokens: str = "bytes"
    """What a token is: bytes (256 of them), or words between white space (each line ends in <eos>)."""


def load_corpus(config: Config, model: Model) -> Corpus:
    """Read the whole text once. Raises `harness.core.problem.CannotRun` where model or text don't fit."""
    refuse([*_task(model.task, model.name), *_tokens(config)])
    from models.data.text import corpus

    found = corpus.read(config.file, config.tokens)
    refuse([*_vocabulary(config, model, found), *_length(config, model, found)])
    return found


def check(config: Config) -> list[Problem]:
    """Unknown tokens, and a file that cannot be used."""
    return [*_tokens(config), *_file(config)]


def check_model(config: Config, task: str, model: Any) -> list[Problem]:
    """A model, described by its keys, that is not for text, or not for bytes."""
    vocabulary = getattr(model, "vocabulary", BYTES)
    too_small = config.tokens == "bytes" and vocabulary < BYTES
    return _task(task, model.name) or ([_too_small(config, vocabulary, BYTES)] if too_small else [])


def _task(task: str, model: str) -> list[Problem]:
    if task == "text":
        return []
    return [Problem("data", "text", f"is for text, {model} does {task}", ({"data": "synthetic"}, {"model": "gpt"}))]


def _tokens(config: Config) -> list[Problem]:
    return one_of("data.tokens", config.tokens, TOKENS)


def _file(config: Config) -> list[Problem]:
    """A text is UTF-8, which only the whole file can show; as bytes, UTF-16 would be half zeros and easy to learn."""
    try:
        for _ in source.decoded(config.file):
            pass
    except CannotRun as error:
        return list(error.problems)
    return []


def _vocabulary(config: Config, model: Model, corpus: Corpus) -> list[Problem]:
    if corpus.vocabulary <= model.classes:
        return []
    return [_too_small(config, model.classes, corpus.vocabulary)]


def _too_small(config: Config, vocabulary: int, needed: int) -> Problem:
    what = "bytes need" if config.tokens == "bytes" else f"the words of {_name(config)} need"
    return Problem("model.vocabulary", vocabulary, f"is too small, {what} {needed}", ({"model.vocabulary": needed},))


def _length(config: Config, model: Model, corpus: Corpus) -> list[Problem]:
    length = model.input_shape[0]
    if len(corpus) > length:
        return []
    needs = f"a sample of {model.name} takes {length + 1}: {length} and the next one"
    fixes = ({"model.sequence": len(corpus) - 1},) if len(corpus) > 1 else ()
    message = f"has {len(corpus)} {config.tokens}, {needs}"
    return [Problem("data.file", config.file, message, fixes, "a longer text")]


def _name(config: Config) -> str:
    return source.TOPICS if config.file is None else config.file
