"""Layers that recompute by themselves, with `torch.utils.checkpoint`: they train as without it, or are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engines.gpipe.gpipe_module import GPipe
from harness.core.plan import Plan
from harness.nn.dropout import Dropout
from tests.engines import contract, test_contract, test_pipeline, test_torch_pipelining
from tests.engines.contract import Case, gentle
from tests.engines.myelin import cases
from tests.engines.networks import Network, _squares

WIDTH = 4


class Inner(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Dropout(0.5), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.layers(x)
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


def network(reentrant: bool | None) -> Network:
    def layers() -> list[nn.Module]:
        return [nn.Linear(WIDTH, WIDTH), Inner(reentrant), nn.Tanh(), Inner(reentrant), nn.Linear(WIDTH, WIDTH)]

    return Network("inner", layers, lambda n: torch.randn(n, WIDTH), lambda n: torch.randn(n, WIDTH), _squares)


def check(case: Case) -> None:
    """It trains as the same layers without a checkpoint on one device."""
    got, want = contract.run(gentle(case)), contract.run(gentle(replace(case, model=network(None)).reference))
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(got.states[-1]["model"], want.states[-1]["model"], rtol=1e-10, atol=1e-10)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_contract, test_pipeline, test_torch_pipelining):
        for name, reentrant in (("reentrant", True), ("not reentrant", False)):
            monkeypatch.setitem(module.MODELS, name, network(reentrant))


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("mode", test_contract.MODES)
@pytest.mark.parametrize("name", ["reentrant", "not reentrant"])
def test_masks_are_drawn_again_in_one_process(name: str, mode: str) -> None:
    case = test_contract.case(name, 2, mode)
    check(case)
    if mode == "never" or name == "not reentrant":  # a reentrant one cannot be in another checkpoint of torch's
        check(replace(case.reference, plan=Plan.contiguous([5], 4, mode)))


@pytest.mark.usefixtures("ranks", "models")
@pytest.mark.parametrize("name", ["reentrant", "not reentrant"])
def test_masks_are_drawn_again_in_several_processes(name: str) -> None:
    check(cases.case(network(name == "reentrant"), 2))
    check(test_torch_pipelining.case(name, "1f1b"))
    check(test_pipeline.case(name, "zbv"))


@pytest.mark.parametrize("mode", test_contract.MODES)
def test_random_numbers_of_a_task_are_refused_inside(mode: str) -> None:
    """Its stream is not the generator that torch's checkpoint puts back."""

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(nn.Dropout(0.5), x, use_reentrant=False)

    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Noisy()), [1, 1], ["cpu", "cpu"], 2, mode)
    with pytest.raises(RuntimeError, match=r"torch.utils.checkpoint inside of a layer draws random numbers"):
        pipe(torch.ones(4, WIDTH))
    pipe.close()
