"""optimizer.fused: every engine's optimizer takes torch's fused kernels, and trains as it does without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torch.optim import adam, sgd

from tests import tiers
from tests.engines import contract
from tests.engines.test_resuming import ADAM, CASES, FURTHER, MOMENTUM

pytestmark = pytest.mark.usefixtures("ranks")
LEFT_OUT = {"myelin, float16", "periodic, two versions", "delayed, stash"}
"""Rounded too coarsely to be compared; with several updates in a step, which the contract's norms do not know."""
LOSS = 1e-3
"""Adam divides the gradients of biases in front of a batch norm, which are roundings alone, by their own size."""


def forbidden(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("the optimizer is not fused")


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adamw"])
@pytest.mark.parametrize("name", tiers.split(sorted(CASES.keys() - LEFT_OUT), CASES.keys() - FURTHER))
def test_it_trains_as_without_them(name: str, optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, fused = replace(CASES[name](), optimizer=optimizer), replace(optimizer, fused=True)
    if optimizer.name not in case.engine.capabilities.fused:  # such a run is refused
        with pytest.raises(NotImplementedError):
            contract.run(replace(case, optimizer=fused), steps=2)
        return
    want = contract.run(case, steps=2)
    for module, place in ((adam, "_single_tensor_adam"), (adam, "_multi_tensor_adam"), (sgd, "_single_tensor_sgd")):
        monkeypatch.setattr(module, place, forbidden)  # before the ranks are forked
    got = contract.run(replace(case, optimizer=fused), steps=2)
    momentum = optimizer is MOMENTUM
    assert got.losses == pytest.approx(want.losses, rel=contract.TOLERANCE[case.dtype] if momentum else LOSS)
    assert got.states[-1]["optimizer"].keys() == want.states[-1]["optimizer"].keys()
    if momentum:
        torch.testing.assert_close(got.states[-1]["model"], want.states[-1]["model"], rtol=2e-5, atol=2e-5)
