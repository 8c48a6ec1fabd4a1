"""Checkpoints of a module that was split have its own names, and bring its layers back to where they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.capture import split
from harness.worker.checkpoints import _by_layer, _by_module


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


@pytest.fixture
def session() -> Any:
    """What `take_layers` leaves, of layers with weights of their own."""
    chain = split(Tied(), (torch.randint(7, (5,)),))
    return SimpleNamespace(module_names=chain.module_names, state={"model": chain.state_dict(), "steps": 3})


def test_the_module_loads_it(session: Any) -> None:
    saved = _by_module(session.state, session)
    module = Tied()
    module.load_state_dict(saved["model"])
    assert module.state_dict().keys() == saved["model"].keys() and saved["steps"] == 3


@pytest.mark.parametrize("earlier", [False, True])
def test_the_layers_load_it(session: Any, earlier: bool) -> None:
    """Files of earlier versions have the names of the layers."""
    saved = session.state if earlier else _by_module(session.state, session)
    found = _by_layer(saved, session)["model"]
    assert found.keys() == session.state["model"].keys()
    assert all(torch.equal(found[name], value) for name, value in session.state["model"].items())


def test_layers_that_are_the_models_own_keep_their_names() -> None:
    state = {"model": {"0.weight": torch.ones(2)}, "steps": 1}
    session: Any = SimpleNamespace(module_names={})
    assert _by_module(state, session) is state and _by_layer(state, session) is state
