"""Tensors that show the same memory, and layers on two devices that hold them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from harness.core.problem import ProblemError
from harness.measure.count_model import count
from harness.nn import tensor_memory
from harness.nn.tensor_memory import overlapping
from harness.nn.tied import moved
from tests.support.nets import Net
from tests.tiers import examples


def numbered(tensors: list[Tensor]) -> list[list[int]]:
    return [sorted(next(k for k, own in enumerate(tensors) if own is one) for one in g) for g in overlapping(tensors)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_groups_of_those_that_overlap(device: str) -> None:
    whole, other = torch.zeros(8, device=device), torch.zeros(2, 4, device=device)
    assert numbered([whole[:4], whole[4:], other]) == []
    assert numbered([whole[:4], other, whole[4:], whole[2:6]]) == [[0, 2, 3]]
    assert numbered([other, whole, other[0], whole.view(2, 4), other[1]]) == [[0, 2, 4], [1, 3]]
    assert numbered([whole, whole]) == [], "one object"
    assert numbered([whole[0:0], whole[1:1]]) == []
    assert numbered([whole[::2], whole[1::2], whole[::3]]) == [[0, 1, 2]]
    assert numbered([whole.as_strided((2, 2), (3, 0)), whole[1:3]]) == [], "in the gap"


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 5), min_size=2, max_size=6))
@settings(max_examples=examples(200))
def test_groups_are_those_of_their_elements(geometries: list[tuple[int, ...]]) -> None:
    whole = torch.arange(16)
    tensors = [whole.as_strided((a, b), (s, t), offset) for a, b, s, t, offset in geometries]
    elements = [set(tensor.flatten().tolist()) for tensor in tensors]
    groups = [{number} for number in range(len(tensors))]
    for one, other in itertools.combinations(range(len(tensors)), 2):
        if elements[one] & elements[other]:
            joined = [group for group in groups if group & {one, other}]
            groups = [*(group for group in groups if group not in joined), set().union(*joined)]
    assert sorted(numbered(tensors)) == sorted(sorted(group) for group in groups if len(group) > 1)


class Holder(nn.Module):
    """Changes its tensor in the forward pass, if it `writes`; holds it as `kind` says: in a list in a list, for one."""

    def __init__(self, tensor: Tensor, kind: str = "buffer", writes: bool = True) -> None:
        super().__init__()
        self.writes, self.nested = writes, [[tensor]] if kind == "list" else None
        if kind == "buffer":
            self.register_buffer("cache", tensor)
        elif kind == "attribute":
            self.cache = tensor

    def forward(self, x: Tensor) -> Tensor:
        cache = self.nested[0][0] if self.nested else self.cache
        if self.writes:
            cache.mul_(1.1)
        return x * cache.sum()


SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "another view": lambda whole: (whole, whole.view(8)),
    "another shape": lambda whole: (whole.view(1, 8), whole),
    "a part": lambda whole: (whole, whole[3:5]),
    "two parts": lambda whole: (whole[:5], whole[3:]),
    "with steps": lambda whole: (whole[::2], whole[::3]),
}


def layers(pair: tuple[Tensor, Tensor], *more: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Holder(pair[0], *more), nn.Linear(4, 4), Holder(pair[1], *more))


def step(module: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    module(x).square().sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def piped(module: nn.Sequential) -> GPipe:
    return GPipe(module.double(), [2, 2], ["cpu", "cpu"], chunks=2, checkpoint="never")


@pytest.mark.parametrize("kinds", [("buffer", "buffer"), ("list", "buffer"), ("list", "list")])
@pytest.mark.parametrize("name", SHARED)
def test_memory_of_two_devices_that_a_pass_changes_is_refused(name: str, kinds: tuple[str, str]) -> None:
    one, other = SHARED[name](torch.ones(8, dtype=torch.float64))
    module = nn.Sequential(nn.Linear(4, 4), Holder(one, kinds[0]), nn.Linear(4, 4), Holder(other, kinds[1]))
    with pytest.raises(ProblemError, match="layer '1'"):
        step(piped(module))


@pytest.mark.parametrize("kind", ["buffer", "list"])
def test_so_is_one_object_in_different_lists(kind: str) -> None:
    whole = torch.ones(8, dtype=torch.float64)
    module = nn.Sequential(nn.Linear(4, 4), Holder(whole, "list"), nn.Linear(4, 4), Holder(whole, kind))
    with pytest.raises(ProblemError, match="layer '1'"):
        step(piped(module))


class Calls(nn.Module):
    """Computes what a function computes that it shares with others."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_so_is_a_tensor_in_a_function_that_both_call() -> None:
    whole = torch.ones(8, dtype=torch.float64)

    def use(x: Tensor) -> Tensor:
        whole.mul_(1.1)
        return x * whole.sum()

    module = nn.Sequential(nn.Linear(4, 4), Calls(use), nn.Linear(4, 4), Calls(use))
    with pytest.raises(ProblemError, match="layer '1'"):
        step(piped(module))


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_no_pass_changes_is_not(name: str) -> None:
    """Nor what one device has alone, or what is side by side."""
    wanted = step(layers(SHARED[name](torch.ones(8)), "buffer", False).double())
    for got, own in zip(step(piped(layers(SHARED[name](torch.ones(8)), "buffer", False))), wanted, strict=True):
        assert got.shape == own.shape
    whole = torch.ones(8, dtype=torch.float64)
    step(piped(layers((whole[:4], whole[4:]))))
    step(GPipe(layers((whole, whole.view(8))).double(), [4], ["cpu"], chunks=2, checkpoint="never"))


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
@pytest.mark.parametrize("name", SHARED)
def test_the_profile_knows_it(name: str, kind: str) -> None:
    def build() -> nn.Sequential:
        return layers(SHARED[name](torch.ones(8)), kind)

    tensor_memory._meet.cache_clear()
    found = count(Net(build, (4,), "segmentation"), 2, "float32").layers
    written = [[one.name for one in layer.shared_buffers if one.written] for layer in found]
    assert written == [[], ["1.cache"], [], ["1.cache"]]


@pytest.mark.parametrize("name", SHARED)
def test_a_cast_keeps_it(name: str) -> None:
    module = moved(layers(SHARED[name](torch.arange(8.0))), torch.float64)
    one, other = (module[number].cache for number in (1, 3))
    wanted = SHARED[name](torch.arange(8.0, dtype=torch.float64))
    assert torch.equal(one, wanted[0]) and torch.equal(other, wanted[1])
    assert numbered([one, other]) == [[0, 1]]
    for tensor, changed in ((one, wanted[0]), (other, wanted[1])):
        tensor.add_(1), changed.add_(1)
    assert torch.equal(one, wanted[0]) and torch.equal(other, wanted[1])


def test_tables_of_one_memory_are_counted() -> None:
    """Two columns of a table, as attributes: each has gaps, where the other one is."""

    def build() -> nn.Sequential:
        return layers(torch.ones(4, 8).chunk(2, -1), "attribute", False)

    tensor_memory._meet.cache_clear()
    found = count(Net(build, (4,), "segmentation"), 2, "float32").layers
    assert [layer.shared_buffers for layer in found] == [()] * 4


def unusual() -> dict[str, Tensor]:
    whole = torch.ones(4, 4)
    return {
        "nested": torch.nested.nested_tensor([whole[:1], whole[1:]], layout=torch.jagged),
        "sparse": whole.to_sparse(),
        "lazy": nn.UninitializedBuffer(),
        "no elements": whole[:0],
    }


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning")
@pytest.mark.parametrize("name", ["nested", "sparse", "lazy", "no elements"])
def test_tensors_without_memory_of_their_own_overlap_none(name: str) -> None:
    tensor = unusual()[name]
    assert overlapping([tensor, torch.ones(4), tensor]) == []


def test_a_cast_leaves_lazy_buffers_alone() -> None:
    module = moved(nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d()), torch.float64)
    assert module(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64
