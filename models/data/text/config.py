"""The keys of `data=text`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.interfaces import Model
from harness.problem import CannotRun, Problem
from models.data.text import source

if TYPE_CHECKING:
    from models.data.text.corpus import Corpus
    from models.data.text.text import Text

TOKENS = ("bytes", "words")
BYTES = 256


@dataclass
class Config:
    """A real text: the help that ships with Python, or the user's own file."""

    name: str = "text"
    """The data set: models/data/text."""
    file: str | None = None
    """Your text. Null: the topics of Python's own help, half a million characters of English."""
    tokens: str = "bytes"
    """What a token is: bytes (256 of them), or words between white space (each line ends in <eos>)."""


def build(config: Config, model: Model, seed: int) -> Text:
    """Read the whole text once. Raises `harness.problem.CannotRun` where model or text don't fit."""
    if wrong := [*_task(model.task, model.name), *_tokens(config)]:
        raise CannotRun(wrong)
    from models.data.text import corpus
    from models.data.text.text import Text

    found = corpus.read(config.file, config.tokens)
    if wrong := [*_vocabulary(config, model, found), *_length(config, model, found)]:
        raise CannotRun(wrong)
    return Text(found, model.input_shape[0], seed)


def check(config: Config) -> None:
    """Raise ValueError, as `key   what   -> mend`, for unknown tokens and for a file that cannot be used."""
    wrong = [*_tokens(config), *_file(config)]
    if wrong:
        raise ValueError("\n".join(f"{problem.key}   {problem.what}   -> {problem.mend}" for problem in wrong))


def suits(config: Config, task: str, model: Any) -> None:
    """Raise ValueError, as `check` does, if the model that these keys describe is not for text, or not for bytes."""
    wrong = _task(task, model.name)
    vocabulary = getattr(model, "vocabulary", BYTES)
    if not wrong and config.tokens == "bytes" and vocabulary < BYTES:
        wrong = [_too_small(config, vocabulary, BYTES)]
    if wrong:
        raise ValueError("\n".join(f"{problem.key}   {problem.what}   -> {problem.mend}" for problem in wrong))


def _task(task: str, model: str) -> list[Problem]:
    if task == "text":
        return []
    return [Problem("data text", f"is for text, {model} does {task}", "data=synthetic, or model=gpt")]


def _tokens(config: Config) -> list[Problem]:
    if config.tokens in TOKENS:
        return []
    what = f"is not one of {', '.join(TOKENS)}"
    return [Problem(f"data.tokens {config.tokens or repr('')}", what, f"data.tokens={TOKENS[0]}")]


def _file(config: Config) -> list[Problem]:
    """A text is UTF-8, which only the whole file can tell; as bytes, UTF-16 would be half zeros and easy to learn."""
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
    return Problem(f"model.vocabulary {vocabulary}", f"{what} {needed}", f"model.vocabulary={needed}")


def _length(config: Config, model: Model, corpus: Corpus) -> list[Problem]:
    length = model.input_shape[0]
    if len(corpus) > length:
        return []
    what = f"has {len(corpus)} {config.tokens}, a sample of {model.name} takes {length + 1}: {length} and the next one"
    shorter = f", or model.sequence={len(corpus) - 1}" if len(corpus) > 1 else ""
    return [Problem(source.key(config.file), what, f"a longer text{shorter}")]


def _name(config: Config) -> str:
    return source.TOPICS if config.file is None else config.file
