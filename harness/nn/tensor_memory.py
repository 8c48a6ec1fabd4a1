"""Which tensors show the same memory: views of one, or of parts of it.

memory    0 1 2 3 4 5 6 7
a         ~~~~~~~             a and b overlap, and b and c: one group of `overlapping`
b               ~~~~~~~
c                     ~~~
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset of a tensor, in elements."""


def memory(tensor: Tensor) -> tuple[torch.device, int] | None:
    """The memory of a tensor; None if that is not known."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    where = tensor.untyped_storage().data_ptr()
    return (tensor.device, where) if where else None


def storage_of(tensor: Tensor) -> object | None:
    """What two tensors of one storage have in common, on the meta device, too; None where that is not known."""
    with suppress(RuntimeError, ValueError):  # of a tensor that has no memory of its own, or none yet
        if tensor.layout is torch.strided and not tensor.is_nested and tensor.numel():
            real = not isinstance(tensor, FakeTensor)  # those warn when they are asked for an address
            return (real and memory(tensor)) or tensor.untyped_storage()._cdata
    return None


def overlapping(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups of several tensors, each of which overlaps another one of its group; the same object counts once."""
    storages: dict[object, list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if (storage := storage_of(tensor)) is not None:
            storages.setdefault(storage, []).append(tensor)
    groups = (group for shown in storages.values() for near in _near(shown) for group in _groups(near))
    return [group for group in groups if len(group) > 1]


def _near(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors of one storage in lists: between those of two lists there is no memory in common."""
    end, near = 0, list[Tensor]()
    ordered = sorted(tensors, key=lambda one: extent(one)[0] * one.element_size())
    for tensor in ordered:
        first, after = (place * tensor.element_size() for place in extent(tensor))
        if first >= end and near:
            yield near
            near = []
        near.append(tensor)
        end = max(end, after)
    yield near


def _groups(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = []
    for tensor in tensors:
        met = [any(meet(tensor, other) for other in group) for group in groups]
        joined = [other for group, meets in zip(groups, met, strict=True) if meets for other in group]
        groups = [group for group, meets in zip(groups, met, strict=True) if not meets]
        groups.append([*joined, tensor])
    return groups


def extent(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its storage, in elements: the end is one after its last."""
    first = int(tensor.storage_offset())
    return first, first + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have memory in common."""
    if memory(a) is None or memory(a) != memory(b):
        return False
    return meet(a, b)


def meet(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have memory in common."""
    if a.element_size() != b.element_size():
        return True
    return _meet(*((tuple(t.shape), t.stride(), t.storage_offset()) for t in (a, b)))


@lru_cache(maxsize=256)
def _meet(a: Geometry, b: Geometry) -> bool:
    """Whether two tensors of one memory have an element in common."""
    ends = [offset + sum((n - 1) * step for n, step in zip(*sizes, strict=True)) for *sizes, offset in (a, b)]
    begin = min(a[2], b[2])
    if max(a[2], b[2]) > min(ends):
        return False
    if _has_no_gaps(a) and _has_no_gaps(b):
        return True
    used = np.zeros(max(ends) + 1 - begin, np.bool_)  # of NumPy: torch may be in a mode that computes no values
    mine, others = (as_strided(used[offset - begin :], sizes, strides) for sizes, strides, offset in (a, b))
    mine[...] = True
    return bool(others.any())


def _has_no_gaps(one: Geometry) -> bool:
    """Whether it is contiguous."""
    step = 1
    for size, stride in zip(reversed(one[0]), reversed(one[1]), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
