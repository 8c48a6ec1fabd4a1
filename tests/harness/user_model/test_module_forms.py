"""Modules that torch.compile or nn.DataParallel has wrapped are taken as they were before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.nn.skip import named_layers
from harness.user_model.module_forms import unwrapped
from tests.harness.user_model.test_plugin import made

TEXT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.parts[1] = torch.compile(self.parts[1])
        self.parts[2].compile()

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


def build():
    return Regression({}, (4,), (4,))
"""


@pytest.mark.parametrize("wrapped", ["torch.compile(Net())", "nn.DataParallel(Net())"])
def test_layers_are_those_of_the_module_itself(wrapped: str, tmp_path: Path) -> None:
    """Nothing is compiled, and names are those of the module."""
    torch.manual_seed(0)
    layers = made(tmp_path, TEXT.format(wrapped)).layers()
    torch.manual_seed(0)
    plain = made(tmp_path, TEXT.format("Net()").replace("torch.compile(self.parts[1])", "self.parts[1]")).layers()
    assert [name for name, _ in named_layers(layers)] == [name for name, _ in named_layers(plain)]
    assert len(layers) > 3
    assert layers.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(2, 4)
    assert torch.equal(layers(x), plain(x))
    assert not any(module._compiled_call_impl for module in layers.modules())


def test_a_module_that_is_not_wrapped_is_itself() -> None:
    module = nn.Linear(2, 2)
    assert unwrapped(module) is module and unwrapped(nn.DataParallel(nn.DataParallel(module))) is module
