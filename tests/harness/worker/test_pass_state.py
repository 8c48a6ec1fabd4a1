"""What passes leave in modules, for a checkpoint."""

from __future__ import annotations

import io
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.worker.pass_state import PassState


class Net(nn.Module):
    """Changes something in each pass, as `what` says."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(2, 2)
        self.number, self.tensor, self.fixed = 0, torch.zeros(2), torch.ones(2)
        self.values: Any = {"list": [], "deque": deque(maxlen=2), "set": set(), "dict": {}}.get(what, ())
        self.alias = self.values
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("gone", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.what == "number":
            self.number += 1
        elif self.what == "tensor":
            self.tensor = self.tensor + 1
        elif self.what == "in place":
            self.tensor.add_(1)
        elif self.what in ("kept", "gone"):
            getattr(self, self.what).add_(1)
        elif self.what == "dict":
            self.values["sum", 1] = [y.detach().sum(), "text"]
        elif self.what == "set":
            self.values.add(3)
        elif self.what == "graph":
            self.tensor = y
        elif self.what == "object":
            self.values = object()
        else:
            self.values.append(float(y.sum()))
        return y


def stored(value: Any) -> Any:
    """As a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WHAT = ("number", "tensor", "in place", "gone", "list", "deque", "set", "dict")


@pytest.mark.parametrize("what", WHAT)
def test_what_has_changed_is_there_again(what: str) -> None:
    net, other = Net(what), Net(what)
    state, begun = PassState(nn.Sequential(net)), PassState(nn.Sequential(other))
    assert state.changed() == {}
    for _ in range(3):
        net(torch.ones(1, 2))
    (names,) = state.changed().values()
    assert len(names) == (2 if what in ("list", "deque", "set", "dict") else 1)
    begun.put(stored(state.changed()))
    assert other.number == net.number and repr(other.values) == repr(net.values)
    assert torch.equal(other.tensor, net.tensor) and torch.equal(other.gone, net.gone)
    assert other.alias is other.values, "in place, for whoever has it, too"


@pytest.mark.parametrize("what", ["graph", "object"])
def test_what_the_next_pass_makes_and_what_no_checkpoint_holds_is_left_out(what: str) -> None:
    net = Net(what)
    state = PassState(net)
    net(torch.ones(1, 2))
    assert state.changed() == {}


def test_a_buffer_of_a_state_dict_is_each_replicas_own() -> None:
    net = Net("kept")
    alone, several = PassState(net), PassState(net, replicas=True)
    net(torch.ones(1, 2))
    assert alone.changed() == {}
    assert [*several.changed()[""]] == ["kept"]


def test_a_tensor_in_two_places_stays_one() -> None:
    net, other = Net("number"), Net("number")
    state, begun = PassState(net), PassState(other)
    net.tensor = net.fixed = torch.full((2,), 3.0)
    begun.put(stored(state.changed()))
    assert other.tensor is other.fixed and other.tensor.tolist() == [3.0, 3.0]
