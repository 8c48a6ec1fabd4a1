"""What every session begins with and ends in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.interfaces import OptimizerSpec
from harness.runtime.training_state import (
    FUSED,
    OPTIMIZERS,
    choose_kernels,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    optimizer_tensors,
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_nothing_does_nothing(name: str) -> None:
    """Of a stage without parameters: no session has to ask whether there is one."""
    optimizer = make_optimizer([], OptimizerSpec(name, lr=0.1, momentum=0.9 if name == "sgd" else 0.0))
    optimizer.step()
    load_optimizer_state({}, [optimizer], {})
    assert optimizer_state({}, [optimizer]) == {}
    assert optimizer_tensors([optimizer]) == []


def test_an_optimizer_takes_its_numbers_and_its_parameters_once() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(iter([weight]), OptimizerSpec("sgd", lr=0.5, momentum=0.9, weight_decay=0.1))
    for _ in range(2):
        weight.grad = torch.ones(2)
        optimizer.step()
    first = 1 - 0.5 * (1 + 0.1)
    second = first - 0.5 * (0.9 * 1.1 + 1 + 0.1 * first)
    torch.testing.assert_close(weight.detach(), torch.full((2,), second))


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_trains_as_another_and_goes_on_from_the_state_of_another(name: str) -> None:
    states, weights = [], []
    for fused in (False, True):
        weight, spec = nn.Parameter(torch.ones(2, dtype=torch.float64)), OptimizerSpec(name, lr=0.5, fused=fused)
        first, second = (make_optimizer([weight], spec) for _ in range(2))
        for optimizer in (first, second):
            weight.grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
            assert bool(optimizer.param_groups[0]["fused"]) == fused
            optimizer.step()
            states.append(optimizer_state({"w": weight}, [optimizer]))
            load_optimizer_state({"w": weight}, [second], states[0])  # of the one that is not fused
        weights.append(weight.detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[2:], states[:2], rtol=1e-12, atol=1e-12)


def updated(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], first: int = 0, steps: int = 3) -> None:
    """Each weight gets the gradients of its own name: the same whichever others there are."""
    for step in range(first, first + steps):
        for weight in weights:
            torch.manual_seed(100 * step + weight.ndim)
            weight.grad = torch.randn_like(weight)
        optimizer.step()


def some_weights() -> list[nn.Parameter]:
    torch.manual_seed(9)
    return [nn.Parameter(torch.randn(*shape)) for shape in ((4, 6), (6,), (3, 2, 3, 3))]


def test_nadam_has_decoupled_weight_decay_and_its_first_beta() -> None:
    mine, theirs = some_weights(), some_weights()
    updated(make_optimizer(mine, OptimizerSpec("nadam", lr=0.1, weight_decay=0.1, beta1=0.99)), mine)
    updated(torch.optim.NAdam(theirs, 0.1, (0.99, 0.999), weight_decay=0.1, decoupled_weight_decay=True), theirs)
    assert all(map(torch.equal, mine, theirs))


def test_muon_updates_matrices_and_adamw_the_rest() -> None:
    mine, (matrix, *others) = some_weights(), some_weights()
    updated(make_optimizer(mine, OptimizerSpec("muon", lr=0.1, weight_decay=0.1, beta1=0.8)), mine)
    updated(torch.optim.Muon([matrix], 0.1, 0.1, 0.8, adjust_lr_fn="match_rms_adamw"), [matrix])
    updated(torch.optim.AdamW(others, 0.1, weight_decay=0.1), others)
    assert all(map(torch.equal, mine, [matrix, *others]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_a_state(name: str) -> None:
    spec = OptimizerSpec(name, lr=0.1, momentum=0.9 if name == "sgd" else 0.0, nesterov=name == "sgd", weight_decay=0.1)
    whole, halves = some_weights(), some_weights()
    updated(make_optimizer(whole, spec), whole, steps=5)
    named = {str(number): weight for number, weight in enumerate(halves)}
    first, second = make_optimizer(halves, spec), make_optimizer(halves, spec)
    updated(first, halves)
    load_optimizer_state(named, [second], optimizer_state(named, [first]))
    updated(second, halves, first=3, steps=2)
    assert all(map(torch.equal, whole, halves))


def test_a_state_goes_where_the_optimizer_reads_it() -> None:
    """Moments of a weight without a dimension to its device; counters of steps only to kernels that are fused."""
    saved = {"w": {"step": torch.tensor(3.0), "exp_avg": torch.tensor(0.5), "exp_avg_sq": torch.tensor(0.5)}}
    for fused, where in ((True, "meta"), (False, "cpu")):
        weight = nn.Parameter(torch.empty((), device="meta"))
        optimizer = make_optimizer([weight], OptimizerSpec("adam", fused=fused))
        load_optimizer_state({"w": weight}, [optimizer], saved)
        found = {key: value.device.type for key, value in optimizer.state[weight].items()}
        assert found == {"step": where, "exp_avg": "meta", "exp_avg_sq": "meta"}


@pytest.mark.parametrize("allowed", [True, False])
def test_convolutions_and_matmuls_of_float32_have_one_precision(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default is TF32 for the ones alone, so that one peak could be that of neither."""
    for place in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(place, "allow_tf32", place.allow_tf32)  # as it was, afterwards
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    choose_kernels(allowed, cudnn_benchmark=not allowed)
    assert torch.backends.cudnn.benchmark is not allowed
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed
