"""Layers are compared with their module before a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.capture import Captured, split_or_whole
from harness.core.problem import CannotRun
from harness.measure import check_layers
from models.hf.config import Config
from models.hf.hf import build

CALLS: list[int] = []


class Net(nn.Module):
    """Two blocks; `what` is called with the value between them."""

    def __init__(self, what: Any = lambda value: value) -> None:
        super().__init__()
        self.first, self.second, self.what = nn.Linear(4, 8), nn.Linear(8, 3), what

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.what(self.first(x))))
        return out if scale is None else out * scale


def counting(value: Tensor) -> Tensor:
    """Another value each time: what a trace has seen once is not what the module does the next time."""
    CALLS.append(1)
    return value * (1.0 + len(CALLS))


def single_precision(value: Tensor) -> Tensor:
    if value.dtype == torch.float64:
        raise RuntimeError("expected float32")
    return value


def checked(module: nn.Module, *further: Tensor) -> list[str]:
    """What is said of a module in layers."""
    example = (torch.randn(2, 4), *further)
    made = Captured(module, split_or_whole(module, example), example)
    said: list[str] = []
    check_layers.check(SimpleNamespace(name="net.py:build", captured=lambda: made), "cpu", said.append)  # type: ignore[arg-type]
    return said


def test_layers_that_compute_the_same() -> None:
    assert checked(Net()) == ["comparing the layers of net.py:build with the module"]


@pytest.mark.parametrize(
    ("further", "fix"), [((), "nn.Sequential(module) in"), ((torch.ones(2, 1),), "nn.Sequential(One(module)), where")]
)
def test_layers_that_compute_something_else_are_refused(further: tuple[Tensor, ...], fix: str) -> None:
    with pytest.raises(CannotRun) as caught:
        checked(Net(counting), *further)
    (problem,) = caught.value.problems
    assert problem.value == "net.py:build" and "does not compute the same in layers" in problem.message
    assert problem.hint.startswith(fix)


def test_a_module_that_does_not_run_in_float64_is_left() -> None:
    assert "does not run in float64, its layers are not compared: RuntimeError" in checked(Net(single_precision))[-1]


def test_a_large_model_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_layers, "MOST_WEIGHTS", 10)
    assert checked(Net(counting)) == ["net.py:build is large: its layers are not compared with the module"]


def test_a_model_that_is_layers_by_itself_is_left() -> None:
    check_layers.check(SimpleNamespace(name="mlp"), "cpu")  # type: ignore[arg-type]


@pytest.mark.usefixtures("computation")
def test_a_network_of_transformers() -> None:
    check_layers.check(build(Config(config="llama_small")), "cpu")
