"""Every engine that recomputes: layers with state train as `engine=single` without recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engines.gpipe.engine import Config as GPipeConfig
from engines.gpipe.engine import build as build_gpipe
from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from harness.core.plan import Plan
from harness.interfaces import Engine
from harness.runtime.stage_module import stage_modules
from tests.engines import contract
from tests.engines.contract import Case, gentle
from tests.engines.myelin import cases
from tests.engines.networks import Network, _squares
from tests.engines.stateful_layers import LAYERS, WIDTH


def _layers() -> list[nn.Module]:
    between = [module for make in LAYERS for module in (make(), nn.Linear(WIDTH, WIDTH))]
    return [nn.Linear(WIDTH, WIDTH), *between]


NETWORK = Network("stateful", _layers, lambda n: torch.randn(n, WIDTH), lambda n: torch.randn(n, WIDTH), _squares)
LENGTH = len(_layers())


def case(engine: Engine, stages: int, mode: str) -> Case:
    first = LENGTH // stages
    plan = Plan.contiguous([first] * (stages - 1) + [LENGTH - first * (stages - 1)], 4, mode)
    return gentle(Case(engine, NETWORK, plan))


@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_single(mode: str) -> None:
    contract.check_training(case(build_single(SingleConfig()), 1, mode))


@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_gpipe(mode: str) -> None:
    contract.check_training(case(build_gpipe(GPipeConfig()), 3, mode))


@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_torchgpipe(mode: str) -> None:
    pytest.importorskip("torchgpipe")
    from engines.torchgpipe.engine import Config, build

    contract.check_training(case(build(Config()), 2, mode))


def test_myelin() -> None:
    contract.check_training(replace(gentle(cases.case(NETWORK, 2, m=2, checkpoint_every="3")), samples=4))


def test_a_stage_of_another_library() -> None:
    """DeepSpeed recomputes a `StageModule` by torch's checkpoint, or by its own."""
    torch.manual_seed(0)
    plain = nn.Sequential(*_layers()).double()
    module = stage_modules(plain, Plan.contiguous([LENGTH], 1), [0])[0]
    batches = [torch.randn(2, WIDTH, dtype=torch.float64) for _ in range(3)]
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    found = []
    for recomputes in (True, False):
        torch.manual_seed(0)
        layers = nn.Sequential(*_layers()).double()
        layers.load_state_dict(state)
        module = stage_modules(layers, Plan.contiguous([LENGTH], 1), [0])[0]
        module.recomputes = recomputes
        losses: list[Tensor] = []
        for i, x in enumerate(batches):
            module.at(0, 0, i)
            losses.append((checkpoint(module, x, use_reentrant=False) if recomputes else module(x)).square().sum())
            if not recomputes:
                losses[i].backward()
        for i in reversed(range(len(batches))) if recomputes else ():
            module.at(0, 0, i, again=True)
            losses[i].backward()
        found.append(([p.grad for p in layers.parameters()], layers.state_dict()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
