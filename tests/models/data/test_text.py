"""Batches of a text: windows, targets that are the next tokens, what fits a model and what does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from harness.core.problem import CannotRun, Problem, advice
from models.data.text.__main__ import main
from models.data.text.config import Config, check
from models.data.text.corpus import Corpus
from models.data.text.text import Text, build
from tests.problems import keys, refused, row, rows

ROOT = Path(__file__).parents[3]


def model(length: int = 16, vocabulary: int = 256, task: str = "text") -> Any:
    """As much of a model as data looks at."""
    return SimpleNamespace(name="gpt_small", task=task, input_shape=(length,), classes=vocabulary)


def counting(tokens: int, length: int, seed: int = 0) -> Text:
    """Token i is i."""
    return Text(Corpus(np.arange(tokens, dtype=np.int32), tokens), length, seed)


def problem(config: Config, taker: Any) -> Problem:
    with pytest.raises(CannotRun) as caught:
        build(config, taker, seed=0)
    (found,) = caught.value.problems
    return found


def test_targets_are_the_next_tokens() -> None:
    batch = counting(100, 4).batch(0, 30)
    assert batch.inputs.shape == batch.targets.shape == (30, 4)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.is_contiguous() and batch.targets.is_contiguous()
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert (batch.inputs[:, 0] % 5 == 0).all(), "windows of 5 tokens do not overlap"


@pytest.mark.parametrize("tokens", [20, 23, 24])
@pytest.mark.parametrize("size", [1, 2])
def test_an_epoch_has_every_whole_window_once(tokens: int, size: int) -> None:
    data = counting(tokens, 4)
    firsts = [first for step in range(8 // size) for first in data.batch(step, size).inputs[:, 0].tolist()]
    assert sorted(firsts[:4]) == sorted(firsts[4:]) == [0, 5, 10, 15]


def test_a_batch_depends_on_seed_step_and_size_alone() -> None:
    data = build(Config(), model(), seed=0)
    before = data.batch(3, 4)
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    again = build(Config(), model(), seed=0).batch(3, 4)
    assert torch.equal(torch.rand(4), expected), "torch's generator was used"
    assert torch.equal(again.inputs, before.inputs) and torch.equal(again.targets, before.targets)
    assert not torch.equal(data.batch(4, 4).inputs, before.inputs)
    assert not torch.equal(build(Config(), model(), seed=1).batch(3, 4).inputs, before.inputs)
    data.batch(3, 4).inputs.zero_()
    assert torch.equal(data.batch(3, 4).inputs, before.inputs)


def test_tokens_are_held_once_and_small() -> None:
    data = build(Config(), model(), seed=0)
    assert data.windows.dtype == torch.uint8
    assert data.windows.data_ptr() == data.corpus.tokens.ctypes.data
    words = build(Config(tokens="words"), model(vocabulary=50_000), seed=0)
    assert words.windows.dtype == torch.int32
    assert words.batch(0, 500).inputs.max() < words.corpus.vocabulary


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("to be or not to be\n" * 9)
    data = build(Config(file=str(tmp_path / "t"), tokens="words"), model(6, 5), seed=0)
    assert data.corpus.vocabulary == 5 and len(data.windows) == 9
    assert data.batch(0, 1).inputs.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert data.batch(0, 1).targets.tolist() == [[1, 2, 3, 0, 1, 4]]


def test_a_vocabulary_that_is_too_small(tmp_path: Path) -> None:
    assert row(problem(Config(), model(16, 255))) == ("model.vocabulary", 255, ["model.vocabulary=256"])
    (tmp_path / "t").write_text("a b c " * 100)
    config = Config(file=str(tmp_path / "t"), tokens="words")
    assert row(problem(config, model(16, 3))) == ("model.vocabulary", 3, ["model.vocabulary=4"])
    build(config, model(16, 4), seed=0)


def test_less_than_a_window(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a" * 16)
    config = Config(file=str(tmp_path / "t"))
    found = problem(config, model(16))
    assert row(found) == ("data.file", str(tmp_path / "t"), ["model.sequence=15"])
    assert {"16", "17:"} <= set(found.message.split())
    assert len(build(config, model(15), seed=0).windows) == 1
    (tmp_path / "t").write_text("a")
    assert advice(problem(config, model(16))) == "a longer text"
    with pytest.raises(ValueError, match="16 tokens are less than a window of 17"):
        counting(16, 16)


def test_vocabulary_and_length_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a")
    with pytest.raises(CannotRun) as caught:
        build(Config(file=str(tmp_path / "t")), model(16, 9), seed=0)
    assert keys(refused(caught)) == ["model.vocabulary", "data.file"]


def test_models_and_tokens_that_are_not_for_text() -> None:
    found = problem(Config(), model(task="classification"))
    assert row(found) == ("data", "text", ["data=synthetic", "model=gpt"])
    assert row(problem(Config(tokens="letters"), model())) == ("data.tokens", "letters", ["data.tokens=bytes"])


def test_check_reports_all_that_needs_no_model(tmp_path: Path) -> None:
    assert check(Config()) == check(Config(tokens="words")) == []
    assert rows(check(Config(file="/none", tokens="letters"))) == [
        ("data.tokens", "letters", ["data.tokens=bytes"]),
        ("data.file", "/none", ["data.file=null"]),
    ]
    (tmp_path / "t").write_bytes(b"a \xff")
    for tokens in ("bytes", "words"):
        (found,) = check(Config(file=str(tmp_path / "t"), tokens=tokens))
        assert found.key == "data.file" and "byte 2 is 0xff" in found.message


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text("a b b\n")
    assert main([str(tmp_path / "t"), "tokens=words"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"text              {tmp_path / 't'}",
        "tokens            4 words",
        "vocabulary        3",
        "unigram entropy   1.0397 nats per token",
    ]
    assert main([]) == 0
    assert "pydoc_data.topics\n" in capsys.readouterr().out
    for wrong in (["a", "b"], ["--tokens"], ["tokens=words", "tokens=bytes"], ["/none"], ["tokens=letters"]):
        assert main(wrong) == 2
        reported = capsys.readouterr()
        assert reported.err and not reported.out


def test_config_and_check_do_not_import_torch() -> None:
    code = """if True:
        import sys
        from models.data.text.config import Config, check
        check(Config(tokens="words"))
        sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))
    """
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_conf() -> None:
    text = (ROOT / "conf/data/text.yaml").read_text()
    assert text.startswith("# ") and "data=text" in text.split("defaults")[0]
    assert OmegaConf.create(text) == {"defaults": ["_text", "_self_"]}
    assert OmegaConf.structured(Config) == {"name": "text", "file": None, "tokens": "bytes"}
