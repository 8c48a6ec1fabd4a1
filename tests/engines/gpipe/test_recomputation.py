"""Layers that a recomputation must not disturb: the gradients and the state are those of the layers alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from harness.core.problem import ProblemError
from tests.engines.stateful_layers import LAYERS, WIDTH, AddOne
from tests.support.gpipe_drivers import DRIVERS
from tests.tiers import examples

MODES = ["never", "except_last", "always"]
CALLS: list[int] = []


def check(layers: nn.Sequential, balance: list[int], chunks: int, mode: str, driver: str, steps: int = 2) -> None:
    """Gradients and buffers after some steps, against the layers alone, micro-batch after micro-batch."""
    plain = layers.double()
    pipe = GPipe(copy.deepcopy(plain), balance, ["cpu"] * len(balance), chunks, mode)
    for step in range(steps):
        x = torch.randn(2 * chunks + step, WIDTH, dtype=torch.float64)
        x[: len(x) // 2, 0] = -1.0
        for part in x.clone().tensor_split(chunks):
            (plain(part) ** 2).sum().backward()
        (DRIVERS[driver](pipe, x.clone()) ** 2).sum().backward()
    mine = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(mine[name].grad, parameter.grad, rtol=1e-9, atol=1e-9, msg=name)
    buffers = dict(pipe.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-9, atol=1e-9, msg=name)
    pipe.close()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_recomputed_as_it_was(layer: Callable[[], nn.Module], mode: str, driver: str) -> None:
    torch.manual_seed(0)
    check(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, WIDTH)), [1, 2], 4, mode, driver)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_layers_are_recomputed_as_they_were(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    chosen = data.draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4))
    layers = [nn.Linear(WIDTH, WIDTH), *(make() for make in chosen), nn.Linear(WIDTH, WIDTH)]
    first = data.draw(st.integers(1, len(layers) - 1))
    chunks, mode, driver = (
        data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from(MODES)),
        data.draw(st.sampled_from([*DRIVERS])),
    )
    check(nn.Sequential(*layers), [first, len(layers) - first], chunks, mode, driver)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_recomputation_does_not_write_to_the_callers_tensor(driver: str) -> None:
    x = torch.randn(4, WIDTH)
    before = x.clone()
    pipe = GPipe(nn.Sequential(AddOne(), nn.Linear(WIDTH, WIDTH)), [1, 1], ["cpu"] * 2, 2, "always")
    DRIVERS[driver](pipe, x).sum().backward()
    assert torch.equal(x, before)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_that_the_forward_pass_changes_is_refused(frozen: bool, driver: str) -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=not frozen)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.code.mul_(0.5)
            return x * self.code

    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()), [1, 1], ["cpu"] * 2, 2, "always")
    with pytest.raises(RuntimeError, match="'code' of Codebook") as raised:
        DRIVERS[driver](pipe, torch.ones(4, WIDTH))
    assert any("stage 1" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_recomputation_that_does_something_else_is_refused(driver: str) -> None:
    class Switched(nn.Module):
        on = False

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if Switched.on:
                self.count += 1
            return x * 2

    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Switched()), [1, 1], ["cpu"] * 2, 2, "always")
    loss = DRIVERS[driver](pipe, torch.ones(4, WIDTH)).sum()
    Switched.on = True
    with pytest.raises(RuntimeError, match="'count' of Switched"):
        loss.backward()


class Drops(nn.Module):
    """Leaves its work out by a random number of Python."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Outside(nn.Module):
    """Keeps its state outside of modules and their attributes, where nobody looks."""

    state = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.state.calls += 1
        return x * self.state.calls


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("layer", [Drops, Outside])
@pytest.mark.parametrize("width", [WIDTH, 700])
def test_a_recomputation_with_other_outputs_is_refused(layer: type[nn.Module], width: int, driver: str) -> None:
    """Of a large output some elements are compared."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, width), layer())
    pipe = GPipe(layers, [1, 2], ["cpu"] * 2, 2, "always")
    loss = DRIVERS[driver](pipe, torch.randn(8, WIDTH)).sum()
    with pytest.raises(RuntimeError, match="other outputs than its first run") as raised:
        loss.backward()
    assert any("stage 1" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("driver", DRIVERS)
def test_weights_that_change_before_the_recomputation_are_refused(driver: str) -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), [1, 1], ["cpu"] * 2, 2, "always")
    x, weight = torch.randn(4, WIDTH), pipe[1].weight
    loss = DRIVERS[driver](pipe, x).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="'weight' of Linear has changed"):
        loss.backward()


def test_other_weights_than_the_modules_own_are_refused() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), [1, 1], ["cpu"] * 2, 2, "always")
    others = {name: value.detach().clone().requires_grad_() for name, value in pipe.named_parameters()}
    loss = torch.func.functional_call(pipe, others, torch.randn(4, WIDTH)).sum()
    with pytest.raises(RuntimeError, match="has changed between a forward pass and its recomputation"):
        loss.backward()


@pytest.mark.parametrize("driver", DRIVERS)
def test_eval_between_forward_and_backward_changes_nothing(driver: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)).double()
    gradients = []
    for evaluated in (False, True):
        pipe = GPipe(copy.deepcopy(layers), [1, 2], ["cpu"] * 2, 2, "always")
        loss = DRIVERS[driver](pipe, torch.linspace(-1, 1, 6 * WIDTH, dtype=torch.float64).reshape(6, WIDTH)).sum()
        if evaluated:
            pipe.eval()
        loss.backward()
        assert pipe.training is not evaluated
        assert all(module.training is not evaluated for module in pipe.modules())
        gradients.append([parameter.grad for parameter in pipe.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_hook_counts_once(driver: str) -> None:
    """In its closure, and in a global list."""
    layers, calls = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), [0]
    CALLS.clear()
    layers[1].register_forward_hook(lambda *_: CALLS.append(1))
    layers[1].register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    pipe = GPipe(layers, [1, 1], ["cpu"] * 2, 3, "always")
    DRIVERS[driver](pipe, torch.ones(6, WIDTH)).sum().backward()
    assert calls == [3] and CALLS == [1, 1, 1]


class Decays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return x * 2


class ShowsTwice(nn.Module):
    """A view of a buffer, and a NumPy array of it: each would become a copy of its own."""

    def __init__(self, array: bool) -> None:
        super().__init__()
        self.register_buffer("store", torch.zeros(2, WIDTH))
        self.shown = self.store.numpy() if array else self.store[0]

    def forward(self, x: Tensor) -> Tensor:
        self.shown += 1
        return x * 2


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Decays, "changes the parameter 'weight' of Decays"),
        (lambda: ShowsTwice(False), "changes 'store' of ShowsTwice, whose memory other state shows"),
        (lambda: ShowsTwice(True), "changes a NumPy array of stage 1, whose memory other state shows"),
    ],
)
def test_changes_that_cannot_be_put_back_are_refused(layer: Callable[[], nn.Module], message: str, driver: str) -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer()), [1, 1], ["cpu"] * 2, 2, "always")
    with pytest.raises(RuntimeError, match=message) as raised:
        DRIVERS[driver](pipe, torch.ones(4, WIDTH))
    assert any("stage 1" in note for note in raised.value.__notes__)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return x * 1


class Reads(nn.Module):
    def __init__(self, other: Keeps) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.others[0].last


def by_list() -> nn.Sequential:
    keeps = Keeps()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), keeps, nn.Linear(WIDTH, WIDTH), Reads(keeps))


def by_hooks() -> nn.Sequential:
    layers, box = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), {}
    layers[1].register_forward_hook(lambda module, x, y: box.__setitem__("y", y))
    layers[3].register_forward_hook(lambda module, x, y: y + box["y"])
    return layers


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize(
    ("layers", "name"), [(by_list, "1: a tensor of Keeps"), (by_hooks, "1: 'box' of a forward hook")]
)
def test_a_tensor_that_goes_past_the_pipeline_is_refused(
    layers: Callable[[], nn.Sequential], name: str, mode: str, chunks: int
) -> None:
    pipe = GPipe(layers(), [2, 2], ["cpu"] * 2, chunks, mode)
    with pytest.raises(ProblemError, match=f"{name}.*layer '1' .device 0. and layer '3' .device 1. share"):
        pipe(torch.ones(6, WIDTH)).sum().backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", [by_list, by_hooks])
def test_a_tensor_that_goes_past_layers_of_one_stage(layers: Callable[[], nn.Sequential], mode: str) -> None:
    torch.manual_seed(0)
    plain = layers().double()
    expected, x = [], torch.randn(6, WIDTH, dtype=torch.float64)
    (plain(x) ** 2).sum().backward()
    expected = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    pipe = GPipe(plain, [1, 3], ["cpu"] * 2, 3, mode)
    (pipe(x) ** 2).sum().backward()
    torch.testing.assert_close([p.grad for p in pipe.parameters()], expected, rtol=1e-12, atol=1e-12)
