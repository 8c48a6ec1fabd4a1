"""Values between layers, tensors and tuples of them, and what they share on their way from stage to stage.

    layer 1   (y, y)           one tensor stays one                    a layer may work in place on it
    layer 2   (y, y[:, :2])    tensors that overlap become copies      RuntimeError if a layer changes one of them

Overlapping tensors get a mark, which goes along with their copies. Tensors of one memory that do not overlap, as those
of `chunk`, are copied without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.nn.tensor_memory import memory, overlap
from harness.nn.tied import version

Value = Tensor | tuple[Tensor, ...]
SEVERAL = (tuple, list)
_MARK = "_overlaps"


def tensors_of(value: Value | None) -> tuple[Tensor, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, SEVERAL) else (value,)


def check_value(value: object, what: str, kinds: tuple[type, ...] = (tuple,)) -> None:
    """Raise TypeError unless `value` is a tensor or a tuple of tensors."""
    inside = [*value] if isinstance(value, SEVERAL) and isinstance(value, kinds) else None
    if not isinstance(value, Tensor) and (inside is None or not all(isinstance(item, Tensor) for item in inside)):
        got = type(value).__name__ if inside is None else [type(item).__name__ for item in inside]
        raise TypeError(f"{what} must be a tensor or a tuple of tensors, got {got}")


def distinct(value: Value | None) -> list[Tensor]:
    """The tensors of a value, each once."""
    return list({id(tensor): tensor for tensor in tensors_of(value)}.values())


@dataclass(frozen=True)
class Form:
    """How a value is made of its distinct tensors: tensor k of it is number `places[k]` of them; `kind` is the type of
    a tuple; `marks` are those of the distinct tensors."""

    kind: type[tuple[Tensor, ...]] | None
    places: tuple[int, ...]
    marks: tuple[object, ...]

    @classmethod
    def of(cls, value: Value | None) -> Form:
        numbers: dict[int, int] = {}
        places = tuple(numbers.setdefault(id(tensor), len(numbers)) for tensor in tensors_of(value))
        return cls(type(value) if isinstance(value, SEVERAL) else None, places, tuple(map(_mark, distinct(value))))

    def built(self, tensors: Sequence[Tensor]) -> Any:
        """A value of this form from its distinct tensors; they get the marks."""
        for tensor, mark in zip(tensors, self.marks, strict=True):
            if mark is not None:
                setattr(tensor, _MARK, mark)
        if self.kind is None:
            return tensors[0] if self.places else None
        return _made(self.kind, [tensors[place] for place in self.places])


def together(function: Callable[..., Sequence[Tensor]], value: Any) -> Any:
    """The value with other tensors: `function` gets the distinct ones, and returns as many."""
    return Form.of(value).built(function(*distinct(value)))


def rebuilt(value: Any, tensors: Sequence[Tensor]) -> Any:
    """A tensor or a tuple of the type of `value` from other tensors, one for each of its own."""
    return _made(type(value), tensors) if isinstance(value, tuple) else tensors[0]


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `function` to every tensor of a value, once if it is there several times; None stays None."""
    return together(lambda *tensors: tuple(map(function, tensors)), value)


def split(value: Any, parts: int) -> list[Any]:
    """The value in `parts` parts of consecutive samples, whose sizes differ by one at most."""
    form = Form.of(value)
    return list(map(form.built, zip(*(tensor.tensor_split(parts) for tensor in distinct(value)), strict=True)))


def placed(value: Any, device: torch.device) -> Any:
    """The value of a batch with its tensors on a device. The host does not wait for those that are in pinned memory."""
    return mapped(lambda tensor: tensor.to(device, non_blocking=True), value)


def gradients(leaves: Any) -> tuple[Tensor | None, ...]:
    """The gradients of the tensors of a value; of one that is there several times, the first has it."""
    seen: set[int] = set()
    found = []
    for leaf in tensors_of(leaves):
        found.append(None if id(leaf) in seen else leaf.grad)
        seen.add(id(leaf))
    return tuple(found)


def mark_overlaps(value: Any, entered: Iterable[Tensor] = ()) -> None:
    """Mark the tensors of a value that overlap, before each is copied.

    `entered` are the tensors that came into the stage: what is made of two with one mark overlaps in the whole model.
    """
    tensors = distinct(value)
    if len(tensors) < 2:
        return
    marks = {memory(tensor): _mark(tensor) for tensor in (*entered, *tensors) if _mark(tensor) is not None}
    groups: list[list[Tensor]] = []
    for tensor in tensors:
        near = [group for group in groups if any(_related(tensor, other, marks) for other in group)]
        groups = [group for group in groups if not any(group is one for one in near)]
        groups.append([tensor, *(other for group in near for other in group)])
    for group in groups:
        if len(group) > 1:
            mark = object()
            for tensor in group:
                setattr(tensor, _MARK, mark)


class OverlapWatch:
    """The tensors of a value that overlapped before they were copied; no layer may change them in place."""

    def __init__(self, value: Any) -> None:
        marked = [tensor for tensor in distinct(value) if _mark(tensor) is not None]
        counts = Counter(id(_mark(tensor)) for tensor in marked)
        self.seen = [(tensor, version(tensor)) for tensor in marked if counts[id(_mark(tensor))] > 1]

    def check(self, layer: str) -> None:
        """After a layer; RuntimeError if it has changed one of them."""
        if any(version(tensor) != before for tensor, before in self.seen):
            raise RuntimeError(
                f"layer {layer!r} works in place on one of two tensors that share memory where they were made, in an "
                "earlier stage or segment: it would change both, and between stages each is copied -> clone one of "
                "them where they are made, or work out of place"
            )


def _made(kind: type[tuple[Tensor, ...]], tensors: Sequence[Tensor]) -> Any:
    """A tuple, a namedtuple, or one of torch's return types."""
    made: Any = getattr(kind, "_make", kind)
    return made(tensors)


def _mark(tensor: Tensor) -> object:
    return getattr(tensor, _MARK, None)


def _related(a: Tensor, b: Tensor, marks: dict[Any, object]) -> bool:
    mark = marks.get(memory(a))
    return overlap(a, b) or (mark is not None and memory(a) != memory(b) and mark is marks.get(memory(b)))
