"""A backward pass in halves gives the gradients of a whole one, each where it belongs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from harness.runtime.split_backward import SplitBackward

Outputs = tuple[Tensor, ...]


def gradients(
    run: Callable[[Tensor, list[nn.Parameter]], Outputs], halves: bool, x_requires_grad: bool = True
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of (x, weights) after two micro-batches, and those after the first halves."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(4)]
    inputs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=x_requires_grad) for _ in range(2)]
    parts = []
    for x in inputs:
        outs = [out for out in run(x, weights) if out.requires_grad]
        given = [torch.randn_like(out) for out in outs]
        if halves:
            parts.append(SplitBackward([get_gradient_edge(out) for out in outs], given, [x]))
        else:
            torch.autograd.backward(outs, given)
    for part in parts:
        part.of_inputs()
    first = [None if one.grad is None else one.grad.clone() for one in (*inputs, *weights)]
    for part in parts:
        part.of_weights()
    return [one.grad for one in (*inputs, *weights)], first


def chain(x: Tensor, w: list[nn.Parameter]) -> Outputs:
    return (((x @ w[0]).relu() @ w[1]).tanh() @ w[2] + w[3].sum(),)


def tied(x: Tensor, w: list[nn.Parameter]) -> Outputs:
    return ((x @ w[0]).relu() @ w[1] @ w[0].t(),)


def two_outputs(x: Tensor, w: list[nn.Parameter]) -> Outputs:
    y = (x @ w[0]).relu()
    return y, (y @ w[1]), w[2] * 2, w[2] @ w[3]


def made_weight(x: Tensor, w: list[nn.Parameter]) -> Outputs:
    """A weight computed from others, used twice."""
    made = w[0] @ w[1].tanh()
    return ((x @ made) @ made + x @ w[2],)


def part_of_x(x: Tensor, w: list[nn.Parameter]) -> Outputs:
    first, second = x.chunk(2, 1)
    return (torch.cat([first @ w[0][:2, :2], second.detach() @ w[1][:2, :2]], 1),)


def nothing_of_x(x: Tensor, w: list[nn.Parameter]) -> Outputs:
    return (w[0] @ w[1], x.detach() @ w[2])


def hooked(x: Tensor, w: list[nn.Parameter]) -> Outputs:
    """Hooks where branches begin, and between; one of them a module's."""
    first = x @ w[0]
    first.register_hook(lambda gradient: 2 * gradient)
    second = first.relu() @ w[1]
    second.grad_fn.register_prehook(lambda gradients: (gradients[0].clamp(-1, 1),))  # type: ignore[union-attr]
    second.register_hook(lambda gradient: gradient * gradient)
    last = second @ w[2]
    last.grad_fn.register_hook(lambda ins, _: tuple(None if one is None else 3 * one for one in ins))  # type: ignore[union-attr]
    return (last * w[3].sum(),)


ALL = [hooked, chain, tied, two_outputs, made_weight, part_of_x, nothing_of_x]


@pytest.mark.parametrize("run", ALL)
@pytest.mark.parametrize("x_requires_grad", [True, False])
def test_both_halves_are_the_whole(run: Callable[..., Outputs], x_requires_grad: bool) -> None:
    whole, _ = gradients(run, False, x_requires_grad)
    found, _ = gradients(run, True, x_requires_grad)
    for one, other in zip(whole, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_each_half_does_its_part() -> None:
    _, first = gradients(chain, True)
    assert [one is not None for one in first] == [True, True, False, False, False, False]
    _, without = gradients(chain, True, x_requires_grad=False)
    assert without == [None] * 6, "there is no gradient of the inputs"


def test_a_weight_that_is_used_twice_has_its_gradient_after_the_first_half() -> None:
    _, first = gradients(tied, True)
    assert [one is not None for one in first[2:]] == [True, False, False, False]


def test_weights_without_a_matrix_have_their_gradients_after_the_first_half() -> None:
    """Those of norms; a bias of a matmul goes with its matrix."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(3, 4, requires_grad=True)
    y = layers(x)
    part = SplitBackward([get_gradient_edge(y)], [torch.ones_like(y)], [x])
    part.of_inputs()
    early = {name for name, one in layers.named_parameters() if one.grad is not None}
    assert early == {"1.weight", "1.bias", "3.weight", "3.bias"}
    part.of_weights()
    assert all(one.grad is not None for one in layers.parameters())


def test_matmuls_are_not_computed_twice() -> None:
    """The first half computes no gradient of a weight, the second none of an input: four matmuls in all."""
    counted: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            counted.extend([str(op)] * ("aten.mm" in str(op)))
            return op(*args, **(kwargs or {}))

    w = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    x = torch.randn(3, 4, requires_grad=True)
    y = (x @ w[0]).relu() @ w[1]
    part = SplitBackward([get_gradient_edge(y)], [torch.ones_like(y)], [x])
    with Count():
        part.of_inputs()
        halves = len(counted)
        part.of_weights()
    assert (halves, len(counted)) == (2, 4)


@given(st.data())
def test_any_graph(data: st.DataObject) -> None:
    """Random graphs of sums and products of an input and weights, with several outputs."""
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from("+*@t"), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12)
    )
    ends = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))

    def run(x: Tensor, w: list[nn.Parameter]) -> Outputs:
        values = [x[:3, :3], *(one[:3, :3] for one in w)]
        for kind, a, b in steps:
            one, other = values[a % len(values)], values[b % len(values)]
            values.append({"+": one + other, "*": one * other, "@": one @ other, "t": one.tanh()}[kind])
        outs = [values[end % len(values)] for end in ends]
        return tuple(out * 1 for out in outs)

    whole, _ = gradients(run, False)
    found, _ = gradients(run, True)
    for one, other in zip(whole, found, strict=True):
        torch.testing.assert_close(
            torch.zeros(1) if other is None else other, torch.zeros(1) if one is None else one, rtol=1e-9, atol=1e-9
        )
