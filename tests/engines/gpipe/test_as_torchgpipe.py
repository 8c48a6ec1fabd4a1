"""What torchgpipe promises its users by its tests (kakaobrain/torchgpipe, a1b4ee2, release 0.0.7), here of `GPipe`.

Not among them:
* its numbers for a skip over one stage (1to3) and its rule that a leaf may not be changed in place: on this torch the
  package itself does not give them. `GPipe` lets layers work in place and gets the right gradient.
* names of its autograd nodes, its partitions, portals, trackers, its Batch class, streams, worker threads and the
  namespaces of skips: these are how it is made. Orders and numbers of recomputations are tested by their spans.
* shared layers and parameters, which it refuses and `GPipe` supports (test_tied_copies.py), automatic balancing (a
  planner's work), and an empty module, which `GPipe` refuses.
* errors are of other types where `GPipe` says more: ValueError for too few devices and for skips that do not match.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from engines.gpipe.gpipe_module import GPipe
from engines.gpipe.microbatch import gather, scatter
from harness.nn.skip import Skippable
from tests.engines.networks import AsComplex, AsReal
from tests.support.gpipe_drivers import DRIVERS

MODES = ["never", "except_last", "always"]


def pipe(*layers: nn.Module, balance: list[int] | None = None, chunks: int = 2, **options: Any) -> GPipe:
    balance = balance or [1] * len(layers)
    return GPipe(nn.Sequential(*layers), balance, ["cpu"] * len(balance), chunks, **options)


def test_it_is_used_like_the_sequential() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    for balance in ([2], [1, 1]):
        split = pipe(first, second, balance=balance)
        assert len(split) == 2 and list(split) == [first, second]
        assert split[0] is first and split[-1] is second
        with pytest.raises(IndexError):
            split[2]


@pytest.mark.parametrize("move", [
    lambda split: split.cuda(), lambda split: split.cpu(), lambda split: split.to("cuda"), lambda split: split.to(0),
    lambda split: split.to(torch.device("cpu")), lambda split: split.to(device="meta"),
    lambda split: split.to(torch.rand(1)), lambda split: split.to("cpu", torch.float64),
    lambda split: split.to_empty(device="cpu"),
])  # fmt: skip
def test_it_cannot_be_moved(move: Any) -> None:
    with pytest.raises(TypeError, match="the layers stay on the devices cpu, cpu"):
        move(pipe(nn.Linear(1, 1), nn.Linear(1, 1)))


def test_it_can_be_cast() -> None:
    split = pipe(nn.Linear(1, 1), nn.Linear(1, 1))
    assert split.to(torch.float64) is split
    assert split(torch.ones(2, 1, dtype=torch.float64)).dtype is torch.float64
    split.to(dtype=torch.float32, non_blocking=True)
    assert split(torch.ones(2, 1)).dtype is torch.float32
    split.bfloat16()
    assert split(torch.ones(2, 1, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_an_empty_module_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="module has no layers"):
        GPipe(nn.Sequential(), [], [])


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_any_number_of_samples(samples: int, recwarn: pytest.WarningsRecorder) -> None:
    assert pipe(nn.Linear(1, 1), chunks=4)(torch.ones(samples, 1)).shape == (samples, 1)
    assert not recwarn.list


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
def test_tuples_of_tensors_of_different_lengths(mode: str, driver: str) -> None:
    """Dimension 0 need not agree, neither of inputs nor of outputs."""

    class Pair(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            a, b = pair
            return a * 2, torch.cat([b, b]) * 3

    a = torch.randn(2, 1, requires_grad=True)
    b = torch.randn(5, 3, requires_grad=True)
    first, second = DRIVERS[driver](pipe(Pair(), nn.Identity(), checkpoint=mode), (a, b))
    assert first.shape == (2, 1) and second.shape == (10, 3)
    (first.sum() + (second * torch.arange(10.0)[:, None]).sum()).backward()
    assert a.grad is not None and b.grad is not None
    torch.testing.assert_close(a.grad, torch.full((2, 1), 2.0))
    weights = 3 * torch.tensor([0.0 + 3, 1 + 4, 2 + 5, 6 + 8, 7 + 9])
    torch.testing.assert_close(b.grad, weights[:, None].expand(5, 3))


def test_scattering_and_gathering_tuples() -> None:
    pieces = scatter((torch.zeros(2, 1), torch.zeros(4, 2)), 2)
    assert [tuple(t.shape for t in piece) for piece in pieces] == [((1, 1), (2, 2))] * 2
    assert [t.shape for t in gather(pieces)] == [(2, 1), (4, 2)]
    with pytest.raises(ValueError, match=r"as many micro-batches each: got shapes \(8, 1\), \(3, 1\) for 4 chunks"):
        scatter((torch.zeros(8, 1), torch.zeros(3, 1)), 4)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_tuple_of_one(driver: str) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, one: tuple[Tensor]) -> tuple[Tensor]:
            return (self.inner(one[0]),)

    x = torch.randn(4, 1, requires_grad=True)
    (y,) = DRIVERS[driver](pipe(One(), One()), (x,))
    y.mean().backward()
    assert x.grad is not None


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_scalar_output_is_refused_by_name(driver: str) -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    with pytest.raises(ValueError, match="the last layer gives a scalar for each micro-batch"):
        DRIVERS[driver](pipe(nn.Linear(1, 1), Mean()), torch.ones(4, 1))


class StashNone(Skippable):
    stashes = ("none", "some")

    def forward(self, x: Tensor) -> Tensor:
        self.stash("none", None)
        self.stash("some", x)
        return x


class PopNone(Skippable):
    pops = ("none", "some")

    def forward(self, x: Tensor) -> Tensor:
        assert self.pop("none") is None
        some: Tensor = self.pop("some")
        return x + some


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", [[0, 1, 2], [0, 1, 0], [0, 0, 0]])
def test_a_stash_of_none(mode: str, placement: list[int], driver: str) -> None:
    split = GPipe(nn.Sequential(StashNone(), nn.Identity(), PopNone()), [1] * 3, ["cpu"] * 3, 5, mode, placement)
    x = torch.rand(10, 1, requires_grad=True)
    DRIVERS[driver](split, x).sum().backward()
    assert x.grad is not None and bool((x.grad == 2).all())


def test_a_stash_of_something_else_is_refused() -> None:
    class StashList(StashNone):
        def forward(self, x: Tensor) -> Tensor:
            self.stash("none", [x])  # type: ignore[arg-type]
            return x

    with pytest.raises(TypeError, match="StashList stashes a list as 'none'"):
        pipe(StashList(), PopNone())(torch.ones(2, 1))


@pytest.mark.parametrize("forgets", ["stash", "pop"])
def test_a_skip_that_is_declared_and_not_used(forgets: str) -> None:
    class Stashes(Skippable):
        stashes = ("x",)

        def forward(self, x: Tensor) -> Tensor:
            if forgets != "stash":
                self.stash("x", x)
            return x

    class Pops(Skippable):
        pops = ("x",)

        def forward(self, x: Tensor) -> Tensor:
            if forgets != "pop":
                self.pop("x")
            return x

    with pytest.raises(LookupError, match="'x'"):
        pipe(Stashes(), Pops())(torch.ones(2, 1))


def test_an_error_ends_the_pass_as_soon_as_possible() -> None:
    seen = []

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02)
            seen.append(x)
            return x

    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        pipe(nn.Identity(), Count(), Fail(), chunks=20)(torch.rand(20))
    assert len(seen) < 20


@pytest.mark.parametrize("value", ["text", 42, [torch.ones(1)], (torch.ones(1), "text")])
def test_only_tensors_come_in_and_out(value: Any) -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return value

    with pytest.raises(TypeError):
        pipe(nn.Identity())(value)
    with pytest.raises(TypeError):
        pipe(Gives())(torch.ones(1))
    with pytest.raises(TypeError):
        pipe(nn.Identity())(torch.ones(1), torch.ones(1))


def test_a_python_function_that_returns_its_input() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Same.apply(x)
            return y

    x = torch.rand(42)
    assert torch.equal(pipe(Layer(), Layer(), checkpoint="always")(x), x)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_tensor_without_gradient_may_be_changed_in_place(driver: str) -> None:
    class Multiply(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] * pair[1].add_(1)

    one, other = torch.tensor([1.0], requires_grad=True), torch.tensor([1.0])
    DRIVERS[driver](pipe(Multiply(), chunks=1, checkpoint="always"), (one, other)).sum().backward()
    assert one.grad is not None and one.grad.item() == 2.0


# What torchgpipe's tests leave open


def wanted_alone(loss: Tensor, x: Tensor, split: GPipe, way: str) -> None:
    parameter = next(split.parameters())
    if way == "grad of inputs":
        torch.autograd.grad(loss, x)
    elif way == "grad of parameters":
        torch.autograd.grad(loss, [*split.parameters()])
    elif way == "grad of parameters, unused allowed":
        torch.autograd.grad(loss, [*split.parameters()], allow_unused=True)
    elif way == "backward to inputs":
        loss.backward(inputs=[x])
    else:
        loss.backward(inputs=[parameter])


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", [
    "grad of inputs", "grad of parameters", "grad of parameters, unused allowed", "backward to inputs",
    "backward to parameters",
])  # fmt: skip
@pytest.mark.parametrize("hooks", ["", "register_hook", "register_post_accumulate_grad_hook"])
def test_some_gradients_alone_are_refused(hooks: str, way: str, mode: str, driver: str) -> None:
    split = pipe(nn.Linear(1, 1), nn.Linear(1, 1), checkpoint=mode)
    for parameter in split.parameters() if hooks else ():
        getattr(parameter, hooks)(lambda _: None)
    x = torch.ones(4, 1, requires_grad=True)
    loss = DRIVERS[driver](split, x).sum()
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad and"):
        wanted_alone(loss, x, split, way)
    assert x.grad is None and all(p.grad is None for p in split.parameters())
    DRIVERS[driver](split, x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("driver", DRIVERS)
def test_hooks_of_parameters_see_gradients_only(driver: str) -> None:
    """One for each micro-batch, whose sum is the gradient."""
    split = pipe(nn.Linear(1, 1), nn.Linear(1, 1), chunks=3)
    parameter, seen, after = split[0].weight, list[Tensor](), []
    parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    split[1].weight.register_post_accumulate_grad_hook(lambda _: after.append(1))
    DRIVERS[driver](split, torch.randn(6, 1)).sum().backward()
    assert len(seen) == len(after) == 3
    torch.testing.assert_close(torch.stack(seen).sum(0), parameter.grad)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
def test_hooks_that_come_after_the_forward_pass_and_go_again(mode: str, driver: str) -> None:
    split = pipe(nn.Linear(1, 1), nn.Linear(1, 1), chunks=3, checkpoint=mode)
    loss, seen, after = DRIVERS[driver](split, torch.randn(6, 1)).sum(), list[Tensor](), list[Tensor]()
    first = split[0].weight.register_hook(seen.append)
    second = split[1].weight.register_post_accumulate_grad_hook(after.append)
    loss.backward()
    assert len(seen) == len(after) > 0 and all(isinstance(gradient, Tensor) for gradient in seen)
    first.remove()
    second.remove()
    seen.clear()
    after.clear()
    DRIVERS[driver](split, torch.randn(6, 1)).sum().backward()
    assert not seen and not after


@pytest.mark.parametrize("move", [
    lambda outer: outer.to("meta"), lambda outer: outer.to_empty(device="meta"),
    lambda outer: outer.to(device="meta", dtype=torch.float64),
])  # fmt: skip
def test_a_module_around_a_pipeline_does_not_move_it(move: Any) -> None:
    outer = nn.Sequential(pipe(nn.Linear(1, 1), nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="stay on the devices"):
        move(outer)
    assert {p.device.type for p in outer.parameters()} == {"cpu"}
    assert {p.dtype for p in outer.double().parameters()} == {torch.float64}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
def test_saved_tensor_hooks_reach_every_layer(mode: str, driver: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()).double()
    split = GPipe(copy.deepcopy(layers), [2, 2], ["cpu"] * 2, 3, mode)
    x, packed, unpacked = torch.randn(6, 3, dtype=torch.float64), list[int](), list[int]()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(1)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(1)
        return tensor

    layers(x).sum().backward()
    with saved_tensors_hooks(pack, unpack):
        loss = DRIVERS[driver](split, x).sum()
    loss.backward()
    assert len(packed) >= len(unpacked) >= 3 * 4
    torch.testing.assert_close([p.grad for p in split.parameters()], [p.grad for p in layers.parameters()])
    with save_on_cpu():
        loss = DRIVERS[driver](split, x).sum()
    loss.backward()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", [[2, 2], [1, 1, 2], [2, 1, 1], [4]])
def test_complex_tensors_between_layers_have_gradients(balance: list[int], mode: str, driver: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), AsComplex(), AsReal(), nn.Linear(3, 3)).double()
    split = GPipe(copy.deepcopy(layers), balance, ["cpu"] * len(balance), 3, mode)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    layers(x).square().sum().backward()
    wanted, x.grad = [x.grad, *(p.grad for p in layers.parameters())], None
    DRIVERS[driver](split, x).square().sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in split.parameters())], wanted)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
def test_complex_inputs_and_outputs(mode: str, driver: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(torch.complex128)
    split = GPipe(copy.deepcopy(layers), [1, 1], ["cpu"] * 2, 3, mode)
    x = torch.randn(6, 3, dtype=torch.complex128)
    layers(x).abs().sum().backward()
    DRIVERS[driver](split, x).abs().sum().backward()
    torch.testing.assert_close([p.grad for p in split.parameters()], [p.grad for p in layers.parameters()])
