"""Stages as modules: a chain of them is the whole model, however it is cut, recomputed or nested in a library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.plan import Plan
from harness.interfaces import Batch, Model, SessionSpec
from harness.nn import dropout
from harness.runtime.stage_module import StageModule, stage_modules
from harness.runtime.training_state import initial_layers, model_state
from planners.block_partition import even
from tests.engines import networks

PLACE = (5, 3, 2)
"""Seed, step and micro-batch."""
SPEC = SessionSpec(("cpu",), dtype="float64", seed=11)


def cut(layers: nn.Sequential, stages: int) -> list[StageModule]:
    """So many stages, or one for each layer."""
    stages = min(stages, len(layers))
    plan = Plan.contiguous(even(len(layers), stages), 1)
    modules = stage_modules(layers, plan, range(stages))
    for module in modules:
        module.at(*PLACE)
    return modules


def drawn(model: Model, samples: int = 4) -> Batch:
    torch.manual_seed(2)
    batch = model.sample(samples)

    def double(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return Batch(double(batch.inputs), double(batch.targets))


def tensors(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


Way = Callable[[nn.Sequential, Batch, Model], float]


def whole(layers: nn.Sequential, batch: Batch, model: Model) -> float:
    """The oracle: no stages."""
    with dropout.keyed(*PLACE):
        loss = model.loss(layers(batch.inputs), batch.targets)
    loss.backward()
    return float(loss.detach())


def chained(stages: int) -> Way:
    """One graph through all stages."""

    def run(layers: nn.Sequential, batch: Batch, model: Model) -> float:
        value: Any = batch.inputs
        for module in cut(layers, stages):
            value = module(*tensors(value))
        loss = model.loss(value, batch.targets)
        loss.backward()
        return float(loss.detach())

    return run


def severed(stages: int, recomputes: bool = False) -> Way:
    """As pipelines do: a graph for each stage, a gradient for every floating-point tensor that crosses a boundary."""

    def run(layers: nn.Sequential, batch: Batch, model: Model) -> float:
        modules = cut(layers, stages)
        value: tuple[Tensor, ...] = (batch.inputs,)
        passes = []
        for number, module in enumerate(modules):
            module.recomputes = recomputes
            arrived = [t.detach().requires_grad_(t.is_floating_point() and number > 0) for t in value]
            value = tensors(checkpoint(module, *arrived, use_reentrant=False) if recomputes else module(*arrived))
            passes.append((module, arrived, value))
        loss = model.loss(value[0], batch.targets)
        gradients = torch.autograd.grad(loss, value[0])
        for module, arrived, left in reversed(passes):
            module.at(*PLACE, again=True)
            assert [t.requires_grad for t in left] == [t.is_floating_point() for t in left]
            torch.autograd.backward([t for t in left if t.requires_grad], gradients)
            gradients = tuple(t.grad for t in arrived if t.requires_grad)
        return float(loss.detach())

    return run


def outcome(way: Way, model: Model) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients, and the state with its running statistics."""
    layers = initial_layers(model, SPEC)
    loss = way(layers, drawn(model), model)
    gradients = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
    return loss, gradients, model_state(layers)


WAYS: dict[str, Way] = {
    "1 stage": chained(1),
    "3 stages": chained(3),
    "a stage for each layer": chained(99),
    "3 stages, severed": severed(3),
    "a stage for each layer, severed": severed(99),
    "3 stages, severed and recomputed": severed(3, recomputes=True),
    "a stage for each layer, severed and recomputed": severed(99, recomputes=True),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("model", networks.ALL.values(), ids=networks.ALL.keys())
def test_a_chain_is_the_whole_model(model: Model, way: Way) -> None:
    loss, gradients, state = outcome(way, model)
    wanted_loss, wanted_gradients, wanted_state = outcome(whole, model)
    assert loss == pytest.approx(wanted_loss, rel=1e-12)
    assert gradients.keys() == wanted_gradients.keys()
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, wanted_state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("model", networks.ALL.values(), ids=networks.ALL.keys())
def test_names_are_those_of_the_whole_model(model: Model, stages: int) -> None:
    layers = initial_layers(model, SPEC)
    names = [name for module in cut(layers, stages) for name in module.state_dict()]
    assert names == list(layers.state_dict())


def test_layers_are_not_copied() -> None:
    layers = initial_layers(networks.ALL["tied"], SPEC)
    modules = cut(layers, 3)
    mine = {id(parameter) for module in modules for parameter in module.parameters()}
    assert mine == {id(parameter) for parameter in layers.parameters()}


def test_skips_travel_through_every_stage_between() -> None:
    """Stages 0 and 1 stash, stage 2 pops two of three."""
    modules = cut(initial_layers(networks.ALL["skips"], SPEC), 4)
    assert [module.arriving for module in modules] == [[], ["a", "b"], ["b", "c"], ["b"]]
    assert [module.leaving for module in modules] == [["a", "b"], ["b", "c"], ["b"], []]


class Add(nn.Module):
    """Changes what arrives."""

    inplace = True

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1.0)


def test_what_arrives_is_changed_only_where_it_is_not_needed_again() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), Add(), nn.Linear(3, 3)).double()
    module = stage_modules(layers, Plan.contiguous([1, 2], 1), [1])[0]
    module.at(*PLACE)
    for recomputes in (False, True):
        module.recomputes = recomputes
        arrived = torch.zeros(2, 3, dtype=torch.float64)
        module(arrived)
        assert bool((arrived == 0.0).all()) is recomputes
    leaf = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)  # torch forbids to change one in place
    module(leaf).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad[0], layers[2].weight.sum(0))


class SideBySide(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(pair, 1)


def test_gradients_can_be_sent_as_they_are() -> None:
    """That of a concatenation is a part of another tensor."""
    module = stage_modules(nn.Sequential(SideBySide()), Plan.contiguous([1], 1), [0])[0]
    pair = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    gradients = torch.autograd.grad(module(*pair), pair, torch.arange(12.0).view(2, 6))
    assert [g[:, 0].tolist() for g in gradients] == [[0.0, 6.0], [3.0, 9.0]]
    assert all(g.is_contiguous() for g in gradients)


def test_running_statistics_follow_the_first_forward_pass_alone() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(3))
    module = cut(layers, 1)[0]
    module(torch.ones(2, 3))
    once = model_state(layers)
    module.at(*PLACE, again=True)
    module(torch.ones(2, 3))
    assert all(torch.equal(value, once[name]) for name, value in model_state(layers).items())
    module.at(*PLACE)
    module(torch.ones(2, 3))
    assert not torch.equal(layers[0].running_mean, once["0.running_mean"])


def test_masks_are_those_of_the_micro_batch() -> None:
    layers = initial_layers(networks.ALL["skips"], SPEC)
    module, inputs = cut(layers, 1)[0], drawn(networks.ALL["skips"]).inputs
    first = module(inputs)
    assert torch.equal(module(inputs), first)
    module.at(5, 3, 4)
    assert not torch.equal(module(inputs), first)


def test_autocast_is_the_stages_own() -> None:
    module = cut(nn.Sequential(nn.Linear(3, 3)), 1)[0]
    assert module(torch.ones(2, 3)).dtype == torch.float32
    module.autocast = torch.bfloat16
    assert module(torch.ones(2, 3)).dtype == torch.bfloat16


def test_without_gradients_nothing_is_made_a_leaf() -> None:
    module = cut(nn.Sequential(nn.Tanh()), 1)[0]
    assert module(torch.ones(2)).requires_grad
    with torch.no_grad():
        assert not module(torch.ones(2)).requires_grad


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


def test_an_error_says_where() -> None:
    layers = nn.Sequential(nn.Tanh(), nn.Tanh(), Broken())
    module = stage_modules(layers, Plan.contiguous([1, 2], 1), [1])[0]
    module.at(*PLACE)
    with pytest.raises(ZeroDivisionError) as caught:
        module(torch.ones(2))
    assert caught.value.__notes__ == ["in stage 1, layer '2', micro-batch 2"]
