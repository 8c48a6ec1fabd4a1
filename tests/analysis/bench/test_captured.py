"""What the benchmark of captured models measures, in few rounds of a small one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from analysis.bench import captured
from harness.capture import split
from harness.user_model.wrappers import LanguageModel


def small() -> LanguageModel:
    return LanguageModel(captured.LSTM(8), captured.VOCABULARY, 4)


def test_a_module_and_its_layers_have_a_row_each() -> None:
    itself, layers = captured.benchmark("small", small(), 3)
    assert (itself["entry"], layers["entry"]) == ("itself", "layers")
    assert itself["step"] > 0 and layers["step"] > 0 and layers["time / itself"] > 0


def test_one_is_split_the_other_one_is_not() -> None:
    model = captured.AsLayers("small", small(), divided=True)
    assert len(model.layers()) == 6
    assert len(captured.AsLayers("small", small(), divided=False).layers()) == 1


def test_layers_that_compute_something_else_are_no_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: Any, **kwargs: Any) -> nn.Sequential:
        chain = split(*args, **kwargs)
        with torch.no_grad():
            next(chain[-1].parameters()).mul_(2.0)
        return chain

    monkeypatch.setattr(captured, "split", other)
    with pytest.raises(AssertionError, match="small"):
        captured.benchmark("small", small(), 3)
