"""Tuples of tensors that share memory: which overlap, and what stays of that in copies."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import Tensor

from harness.runtime.values import OverlapWatch, check_value, mapped, mark_overlaps, tensors_of

Pair = namedtuple("Pair", "a b")


def watched(value: tuple[Tensor, ...]) -> list[int]:
    """The numbers of the tensors that may not be changed in place once they are copied."""
    mark_overlaps(value)
    copies = mapped(Tensor.clone, value)
    return [k for k, tensor in enumerate(copies) if any(tensor is one for one, _ in OverlapWatch(copies).seen)]


def test_what_overlaps() -> None:
    x = torch.zeros(4, 6)
    assert watched((x, x[:, :2])) == [0, 1]
    assert watched((x, x.detach(), torch.zeros(4, 6))) == [0, 1]
    assert watched((x[:, :2], torch.ones(2), x, x[:, 4:])) == [0, 2, 3]
    assert watched((x.view(-1), x.t())) == [0, 1]
    assert watched((x.view(torch.int32), x)) == [0, 1]


def test_what_does_not_overlap() -> None:
    x = torch.zeros(4, 6)
    assert watched((x, x)) == []
    assert watched(x.chunk(2, 0)) == watched(x.chunk(2, 1)) == watched((x[::2], x[1::2])) == []
    assert watched((x, x.clone(), x.new_empty(0), torch.eye(2).to_sparse())) == []


def test_one_tensor_stays_one_and_types_stay() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    first, second, third = mapped(Tensor.clone, (x, y, x))
    assert first is third and first is not second and first is not x
    assert type(mapped(Tensor.clone, Pair(x, y))) is Pair
    assert torch.equal(mapped(Tensor.clone, torch.eye(2).max(1)).values, torch.ones(2))
    assert mapped(Tensor.clone, None) is None


def test_marks_go_through_stages_that_only_pass_tensors_on() -> None:
    x = torch.zeros(4, 6)
    value = (x, x[:, :2])
    mark_overlaps(value)
    a, b = mapped(Tensor.clone, value)
    passed = (b[:1], a * 1, a.t())
    mark_overlaps(passed, (a, b))
    last = mapped(Tensor.clone, passed)
    watch = OverlapWatch(last)
    last[1].add_(1)
    watch.check("4")
    last[2].add_(1)
    with pytest.raises(RuntimeError, match="layer '5' works in place on one of two tensors that share memory"):
        watch.check("5")


@pytest.mark.parametrize("value", [{"a": torch.ones(1)}, [torch.ones(1)], (torch.ones(1), 3), "x"])
def test_what_is_no_value(value: object) -> None:
    with pytest.raises(TypeError, match="the output of layer '3' must be a tensor or a tuple of tensors, got"):
        check_value(value, "the output of layer '3'")
    assert len(tensors_of((torch.ones(1), torch.ones(1)))) == 2
