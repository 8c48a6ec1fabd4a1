"""Parameters that stages on several devices share: each device has a copy, all of them stay equal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from harness.core.problem import ProblemError
from tests.engines import networks
from tests.problems import keys, refused


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return networks.tied().layers().double().eval()


def split(layers: nn.Sequential, balance: list[int], placement: list[int] | None = None) -> GPipe:
    return GPipe(copy.deepcopy(layers), balance, ["cpu"] * len(balance), chunks=3, placement=placement).eval()


def weight_of(pipe: GPipe, layer: int) -> nn.Parameter:
    return pipe.get_parameter(f"{layer}.weight")


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    network = networks.tied()
    return network.loss(module(batch), batch)


def batch(seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return networks.tied().sample(6).inputs


def names_and_gradients(pipe: GPipe) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in pipe.named_parameters(remove_duplicate=False)}


def test_each_device_has_its_own_copy() -> None:
    pipe = split(plain(), [2, 2, 2, 2])
    assert [(one.name, one.stages) for one in pipe.shared] == [
        ("0.weight", [0, 3]),
        ("1.weight", [0, 2]),
        ("1.bias", [0, 2]),
    ]
    assert len({p.data_ptr() for one in pipe.shared for p in one.copies}) == 6
    assert list(pipe.state_dict()) == list(plain().state_dict())


def test_stages_of_one_device_share_a_copy() -> None:
    assert split(plain(), [2, 2, 2, 2], [0, 1, 0, 0]).shared == []


def test_every_copy_gets_the_whole_gradient_and_nothing_twice() -> None:
    """Also where gradients are accumulated over two passes whose backward passes come last."""
    layers = plain()
    pipe = split(layers, [2, 2, 2, 2])
    for rounds in (1, 2):
        sums = [loss(pipe, batch(seed)) for seed in range(rounds)]
        wanted = [loss(layers, batch(seed)) for seed in range(rounds)]
        for mine, theirs in zip(sums, wanted, strict=True):
            mine.backward()
            theirs.backward()
    expected = {name: p.grad for name, p in layers.named_parameters(remove_duplicate=False)}
    for name, gradient in names_and_gradients(pipe).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


def test_copies_stay_equal_bit_for_bit() -> None:
    pipe = split(plain(), [2, 2, 2, 2])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    for seed in range(5):
        optimizer.zero_grad(set_to_none=seed % 2 == 0)
        loss(pipe, batch(seed)).backward()
        optimizer.step()
    for one in pipe.shared:
        assert all(torch.equal(one.copies[0], other) for other in one.copies[1:]), one.name


def test_bytes_of_the_sums_are_counted() -> None:
    pipe = split(plain(), [2, 2, 2, 2])
    loss(pipe, batch()).backward()
    assert pipe.bytes_sent["all_reduce@tied"] == 2 * 8 * (11 * 8 + 8 * 8 + 8)


def test_a_frozen_weight_sends_nothing() -> None:
    layers = plain()
    layers[0].requires_grad_(False)
    pipe = split(layers, [2, 2, 2, 2])
    loss(pipe, batch()).backward()
    assert pipe.shared[0].name == "0.weight"
    assert [p.grad for p in pipe.shared[0].copies] == [None, None]
    assert pipe.bytes_sent["all_reduce@tied"] == 2 * 8 * (8 * 8 + 8)


def test_a_weight_cannot_be_frozen_on_one_device_alone() -> None:
    pipe = split(plain(), [2, 2, 2, 2])
    weight_of(pipe, 0).requires_grad_(False)
    with pytest.raises(ProblemError) as caught:
        loss(pipe, batch()).backward()
    assert keys(refused(caught)) == ["0.weight"]


def test_the_module_itself_stays_tied() -> None:
    """So that another pipeline of it is tied, too; also after a constructor that refused it."""
    layers = plain()
    norm = nn.BatchNorm1d(4)
    with pytest.raises(ValueError):
        GPipe(nn.Sequential(*layers, norm, nn.Identity(), norm), [7, 2, 2], ["cpu"] * 3)
    for _ in range(2):
        pipe = GPipe(layers, [2, 2, 2, 2], ["cpu"] * 4)
        assert layers[7].weight is layers[0].weight and layers[5] is layers[1]
        assert len(pipe.shared) == 3 and weight_of(pipe, 0) is layers[0].weight


def test_copies_stay_linked_when_a_state_is_loaded() -> None:
    """Assigned to them, or with other values for each name: the last one counts, as in the module itself."""
    layers, pipe = plain(), split(plain(), [2, 2, 2, 2])
    state = {name: torch.randn_like(value) for name, value in layers.state_dict().items()}
    layers.load_state_dict(state)
    for assign in (False, True):
        pipe.load_state_dict(copy.deepcopy(state), assign=assign)
        loss(pipe, batch()).backward()
        assert torch.equal(weight_of(pipe, 0), layers[0].weight) and torch.equal(weight_of(pipe, 7), layers[0].weight)
        layers.zero_grad()
        loss(layers, batch()).backward()
        for p in pipe.shared[0].copies:
            torch.testing.assert_close(p.grad, layers[0].weight.grad)
        pipe.zero_grad()


def test_running_statistics_cannot_be_shared_by_devices() -> None:
    """Those of one layer in two places, or one tensor in two layers; what only one stage has is no matter."""
    norm = nn.BatchNorm1d(4)
    layers = nn.Sequential(norm, nn.Linear(4, 4), norm)
    with pytest.raises(ProblemError, match=r"'0.running_mean'.* '0' \(device 0\) .*'2' \(device 1\)"):
        GPipe(layers, [2, 1], ["cpu", "cpu"])
    with pytest.raises(ProblemError, match=r"'0.running_mean'.* '0' \(stage 0\) .*'2' \(stage 1\)"):
        GPipe(layers, [2, 1], ["cpu", "cpu"], placement=[0, 0])
    GPipe(layers, [3], ["cpu", "cpu"])
    one, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other.running_mean = one.running_mean
    with pytest.raises(ProblemError) as caught:
        GPipe(nn.Sequential(one, other), [1, 1], ["cpu", "cpu"])
    assert keys(refused(caught)) == ["model"]
    linear = nn.Linear(4, 4)
    mixed = nn.Sequential(nn.Sequential(linear, nn.ReLU()), nn.Sequential(linear, nn.BatchNorm1d(4)))
    assert len(GPipe(mixed, [1, 1], ["cpu", "cpu"]).shared) == 2


def test_an_error_in_the_backward_pass_ends_the_sums_too() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError("on purpose")

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Fails.apply(x)  # type: ignore[no-any-return]

    layers = plain()
    layers[2] = Failing()
    pipe = split(layers, [2, 2, 2, 2])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            loss(pipe, batch()).backward()
