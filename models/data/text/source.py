"""The text itself, block by block: a file of the user's, or one that every Python has. Free of torch and numpy."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from harness.core.problem import CannotRun, Problem

BLOCK_BYTES = 1 << 20
"""Bytes of a file that are read at once."""
TOPICS = "pydoc_data.topics"
"""The module with the text of Python's own help; it differs a little from one Python to the next."""


def blocks(file: str | None) -> Iterator[bytes]:
    """The bytes of `file`; of null, all topics of Python's own help in the order of their names.

    Raises `harness.core.problem.CannotRun` if there is no such file, it cannot be read, or it is empty.
    """
    if file is None:
        yield _topics().encode()
        return
    path = Path(file).expanduser()
    try:
        if not file or not path.exists():
            raise problem(file, "does not exist")
        if not path.is_file():
            raise problem(file, "is a folder" if path.is_dir() else "is no regular file")
        with path.open("rb") as handle:
            if not (block := handle.read(BLOCK_BYTES)):
                raise problem(file, "is empty: 0 bytes")
            while block:
                yield block
                block = handle.read(BLOCK_BYTES)
    except OSError as error:
        raise problem(file, f"cannot be read: {error.strerror}") from error


def decoded(file: str | None) -> Iterator[str]:
    """Yield the file as text. Raises `harness.core.problem.CannotRun` with the first byte that is not UTF-8, too."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    for block in chain(blocks(file), [b""]):
        begin = read - len(decoder.getstate()[0])  # it may still hold the first bytes of a character
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            wrong = f"byte {begin + error.start} is 0x{error.object[error.start]:02x} ({error.reason})"
            raise problem(file, f"is not UTF-8: {wrong}", "iconv -t utf-8 makes a file in UTF-8") from error
        yield text
        read += len(block)


def problem(file: str | None, message: str, hint: str = "data.file=FILE with a text") -> CannotRun:
    """Return an error for `file`."""
    return CannotRun([Problem("data.file", file, message, ({"data.file": None},), hint)])


def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[topic] for topic in sorted(topics))
