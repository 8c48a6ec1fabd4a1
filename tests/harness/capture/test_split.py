"""A chain computes what its module computes, for any number of samples, and has cuts where they are expected."""

from __future__ import annotations

import pytest
import torch

from harness.capture import split, verify
from tests.harness.capture.networks import NETWORKS


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_gradients_are_those_of_the_module(name: str) -> None:
    module, args, kwargs = NETWORKS[name]()
    verify(module, split(module, args, kwargs), args, kwargs)
