"""Tokens of a text: bytes as they are, words by falling frequency, and texts that cannot be used."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.core.problem import CannotRun, Problem
from models.data.text import source
from models.data.text.corpus import Corpus, read
from tests.problems import fixes
from tests.tiers import examples


def words_of(path: Path, text: str) -> Corpus:
    path.write_bytes(text.encode())
    return read(str(path), "words")


def problem(file: str | Path, tokens: str) -> Problem:
    with pytest.raises(CannotRun) as caught:
        read(str(file), tokens)
    (found,) = caught.value.problems
    assert (found.key, found.value) == ("data.file", str(file))
    return found


def expected(text: str) -> list[int]:
    """The slow way: lines, words, a sorted vocabulary."""
    lines = text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    words = [word for line in lines for word in (*line.split(), "<eos>")]
    count = Counter(words)
    number = {word: i for i, word in enumerate(sorted(count, key=lambda word: (-count[word], words.index(word))))}
    return [number[word] for word in words]


def test_words_by_falling_frequency_ties_by_appearance(tmp_path: Path) -> None:
    found = words_of(tmp_path / "t", " = A title = \n \n b a b c\n")
    #                      <eos> 3   = 2   b 2   A title a c
    assert found.tokens.tolist() == [1, 3, 4, 1, 0, 0, 2, 5, 2, 6, 0]
    assert found.vocabulary == 7 and found.tokens.dtype == np.int32


@pytest.mark.parametrize("end", ["", "\n", " ", "\r\n", " \r\n"])
def test_the_last_line_ends_once(tmp_path: Path, end: str) -> None:
    assert words_of(tmp_path / "t", f"a b\r\na{end}").tokens.tolist() == [0, 2, 1, 0, 1]


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab \n\r\té—\u2028𝄞"), min_size=1, max_size=40), block=st.integers(1, 9))
def test_blocks_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, block: int) -> None:
    """Within a word, a character, a line's end."""
    monkeypatch.setattr(source, "BLOCK_BYTES", block)
    found = words_of(tmp_path / "t", text)
    assert found.tokens.tolist() == expected(text)
    assert found.vocabulary == max(expected(text)) + 1
    assert read(str(tmp_path / "t"), "bytes").tokens.tobytes() == text.encode()


def test_bytes_need_no_utf_8(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(range(256)) * 3)
    found = read(str(tmp_path / "t"), "bytes")
    assert found.tokens.dtype == np.uint8 and found.tokens.tolist() == [*range(256)] * 3
    assert found.vocabulary == 256


def test_unigram_entropy(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"aaab" * 5)
    share = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert read(str(tmp_path / "t"), "bytes").unigram_entropy() == pytest.approx(share, rel=1e-12)
    (tmp_path / "t").write_bytes(bytes(range(256)))
    assert read(str(tmp_path / "t"), "bytes").unigram_entropy() == pytest.approx(math.log(256), rel=1e-12)


def test_counts_of_a_text_in_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.data.text.corpus.PART", 3)
    assert words_of(tmp_path / "t", "a b b c c c c").tokens.tolist() == [2, 1, 1, 0, 0, 0, 0, 3]


def test_the_default_is_english_that_every_python_has() -> None:
    found = read(None, "bytes")
    assert len(found) > 300_000
    text = found.tokens.tobytes().decode()
    assert text.startswith('The "assert" statement') and text.count(" the ") > 3000
    assert 3.0 < found.unigram_entropy() < 3.5
    words = read(None, "words")
    assert len(words) == len(text.split()) + text.count("\n") + (not text.endswith("\n"))
    assert words.vocabulary == len(set(text.split())) + 1


@pytest.mark.parametrize("tokens", ["bytes", "words"])
def test_texts_that_cannot_be_used(tmp_path: Path, tokens: str) -> None:
    missing = problem(tmp_path / "none", tokens)
    assert missing.message == "does not exist"
    assert fixes(missing) == ["data.file=null"] and missing.hint == "data.file=FILE with a text"
    assert problem("", tokens).message == "does not exist"
    assert problem(tmp_path, tokens).message == "is a folder"
    (tmp_path / "empty").touch()
    assert problem(tmp_path / "empty", tokens).message == "is empty: 0 bytes"
    assert problem(tmp_path / "empty" / "x", tokens).message in ("does not exist", "cannot be read: Not a directory")
    assert problem("x" * 300, tokens).message == "cannot be read: File name too long"
    os.mkfifo(tmp_path / "pipe")
    assert problem(tmp_path / "pipe", tokens).message == "is no regular file"


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_the_first_byte_that_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", block)
    for data, wrong in (
        (b"abc \xff d\xff", "byte 4 is 0xff (invalid start byte)"),
        ("é".encode() * 3 + b"\xc3(", "byte 6 is 0xc3 (invalid continuation byte)"),
        ("a é\n".encode() + b"\xe2\x82", "byte 5 is 0xe2 (unexpected end of data)"),
        ("abc".encode("utf-16"), "byte 0 is 0xff (invalid start byte)"),
    ):
        (tmp_path / "t").write_bytes(data)
        found = problem(tmp_path / "t", "words")
        assert found.message == f"is not UTF-8: {wrong}"
        assert fixes(found) == ["data.file=null"] and "iconv" in found.hint
        assert len(read(str(tmp_path / "t"), "bytes")) == len(data)
