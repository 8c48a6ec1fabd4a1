"""Makes one trace of three: what differs between them follows from the number of samples, the dtype, or training.

pass 1   n samples, float32, training       view(2, 16)    dropout(p=0.1)    full(-3.4e38)
pass 2   3 n samples, float64, training     view(6, 16)    dropout(p=0.1)    full(-1.8e308)
pass 3   2 n samples, float32, evaluation   view(4, 16)    dropout(p=0.0)    full(-3.4e38)
one      Samples(1, 0), Training(0.1, 0.0), Limit("min")

The most samples are in the middle: a number of passes, which a module may count, is none of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from harness.capture.structure import Nest, Ref, refs
from harness.capture.trace import Call, Item, Trace, Value

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.layout, torch.memory_format, range, Enum)
LIMITS = ("min", "max", "eps", "tiny", "smallest_normal", "resolution")


@dataclass(frozen=True)
class Samples:
    """An integer: `factor` times the number of samples, plus `offset`."""

    factor: int
    offset: int


@dataclass(frozen=True)
class Scaled:
    """A number: `factor` times a power of the number of samples."""

    factor: float
    power: int


@dataclass(frozen=True)
class Training:
    """Another value in training than in evaluation."""

    training: Any
    evaluation: Any


@dataclass(frozen=True)
class Limit:
    """A limit of the dtype of the weights, as torch.finfo has them."""

    name: str


@dataclass(frozen=True)
class Unstable:
    """An object that each pass makes for itself."""

    value: Any


class Follows(Enum):
    """What comes from the tensors of a layer."""

    DTYPE = "the dtype of the weights"
    DEVICE = "the device"


class Disagreement(Exception):
    """Two passes do different things; `where` is file and line."""

    def __init__(self, where: tuple[str, int]) -> None:
        super().__init__()
        self.where = where


class Agreement:
    """Three passes; the second may have another dtype, the third one evaluates if `evaluates`.

    Tensors of different passes are the same one if they come from the same place of the model, or are the same result
    of the same function. In evaluation a dropout returns what it gets, so one tensor may stand for two. A call in which
    passes differ inside stays whole: `differs` says where.
    """

    def __init__(self, one: Trace, two: Trace, three: Trace, evaluates: bool) -> None:
        self.traces = (one, two, three)
        self.evaluates = evaluates
        self._known: tuple[dict[int, int], ...] = ({}, {})

    def merge(self) -> Trace:
        """The first trace, with what the others say. Raises Disagreement."""
        one, *others = self.traces
        self._children(*(trace.top for trace in self.traces))
        last = one.top.items[-1].where
        root = one.top.items[0]
        if isinstance(root, Call) and root.differs:
            raise Disagreement(root.differs)
        one.result = self._form([trace.result for trace in self.traces], last)
        if any(trace.replaced.keys() != one.replaced.keys() for trace in others):
            raise Disagreement(last)
        second, third = self._known
        for value in one.values:
            if value.number in second and value.number in third:
                self._sizes(value, others[0].values[second[value.number]], others[1].values[third[value.number]])
        return one

    def _sizes(self, *values: Value) -> None:
        one, two, _ = values
        one.follows_dtype = one.dtype == torch.float32 and two.dtype == torch.float64
        for dim, sizes in enumerate(zip(*(value.shape for value in values), strict=False)):
            found = self._samples(*sizes)
            if one.batch_dim is None and found and not found.offset:
                one.batch_dim = dim, found.factor

    def _children(self, one: Call, two: Call, three: Call) -> None:
        for items in zip(one.items, two.items, three.items, strict=False):
            self._item(*items)
        counts = [len(call.items) for call in (one, two, three)]
        if len(set(counts)) > 1:
            longest = max((one, two, three), key=lambda call: len(call.items))
            raise Disagreement(longest.items[min(counts)].where)

    def _item(self, one: Item, two: Item, three: Item) -> None:
        if _what(one) != _what(two) or _what(one) != _what(three):
            raise Disagreement(one.where)
        one.args = self._form((one.args, two.args, three.args), one.where)
        one.kwargs = self._form((one.kwargs, two.kwargs, three.kwargs), one.where)
        if isinstance(one, Call) and isinstance(two, Call) and isinstance(three, Call):
            try:
                self._children(one, two, three)
            except Disagreement as error:
                one.differs = error.where
        for mine, *theirs in zip(*(refs(item.result) for item in (one, two, three)), strict=False):
            for known, number in zip(self._known, theirs, strict=True):
                known.setdefault(mine, number)
        one.result = self._form((one.result, two.result, three.result), one.where)

    def _ref(self, forms: Sequence[Any], where: tuple[str, int]) -> Ref:
        one, *others = forms
        for form, trace, known in zip(others, self.traces[1:], self._known, strict=True):
            if not isinstance(one, Ref) or not isinstance(form, Ref):
                raise Disagreement(where)
            if one.number not in known and _same_source(self.traces[0], one, trace, form):
                known[one.number] = form.number
            if known.get(one.number) != form.number:
                raise Disagreement(where)
        assert isinstance(one, Ref)
        return one

    def _form(self, forms: Sequence[Any], where: tuple[str, int]) -> Any:
        one = forms[0]
        if isinstance(one, Nest):
            if any(not isinstance(form, Nest) or _shape(form) != _shape(one) for form in forms):
                raise Disagreement(where)
            return Nest(
                one.kind,
                tuple(self._form(items, where) for items in zip(*(f.items for f in forms), strict=True)),
                one.keys,
            )
        if any(isinstance(form, Ref) for form in forms):
            return self._ref(forms, where)
        return self._constant(*forms)

    def _constant(self, one: Any, two: Any, three: Any) -> Any:
        if isinstance(one, torch.device):
            return Follows.DEVICE if one.type == "cpu" else one
        if _same(one, two) and _same(one, three):
            return one
        if all(isinstance(each, PLAIN) for each in (one, two, three)):
            found = self._number(one, two, three)
            if found is not None:
                return found
            if self.evaluates and _same(one, two):
                return Training(one, three)
            if _same(one, three):
                return Follows.DTYPE if isinstance(one, torch.dtype) else self._limit(one, two)
        return Unstable(one)

    def _number(self, one: Any, two: Any, three: Any) -> Samples | Scaled | None:
        kinds = {type(each) for each in (one, two, three)}
        if kinds == {int}:
            return self._samples(one, two, three)
        if kinds <= {int, float}:
            for power in (1, -1):
                factors = [
                    each / trace.batch**power for each, trace in zip((one, two, three), self.traces, strict=True)
                ]
                if all(math.isclose(factor, factors[0], rel_tol=1e-12) for factor in factors):
                    return Scaled(factors[0], power)
        return None

    def _samples(self, one: int, two: int, three: int) -> Samples | None:
        first, second, third = (trace.batch for trace in self.traces)
        factor, rest = divmod(two - one, second - first)
        offset = one - factor * first
        return Samples(factor, offset) if factor and not rest and factor * third + offset == three else None

    def _limit(self, one: Any, two: Any) -> Any:
        for name in LIMITS:
            if one == getattr(torch.finfo(torch.float32), name) and two == getattr(torch.finfo(torch.float64), name):
                return Limit(name)
        return one


def _same_source(one: Trace, first: Ref, other: Trace, second: Ref) -> bool:
    sources = [trace.values[ref.number].source for trace, ref in ((one, first), (other, second))]
    if sources[0] is None:
        return False
    return sources[0] is sources[1] or (not isinstance(sources[0], Tensor) and sources[0] == sources[1])


def _same(one: Any, two: Any) -> bool:
    if one is two or (one != one and two != two):
        return True
    return type(one) is type(two) and isinstance(one, (*PLAIN, set, frozenset)) and bool(one == two)


def _what(item: Item) -> Any:
    """What is called, and with which gradients."""
    if isinstance(item, Call):
        return item.path, item.opaque, item.grad
    return item.function, item.grad


def _shape(nest: Nest) -> Any:
    return nest.kind, len(nest.items), nest.keys
