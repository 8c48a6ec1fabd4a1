"""Cutting a mini-batch into micro-batches, and putting it together again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Value = Tensor | tuple[Tensor, ...]
Parts = dict[str, Value]  # what a stage takes or gives: "" is the layers' value, other keys are skips


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def mapped(function: Callable[[Tensor], Tensor], value: Value) -> Value:
    """Apply `function` to every tensor of a value."""
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def check_value(value: object, what: str) -> None:
    """Raise TypeError unless `value` is a tensor or a tuple of tensors."""
    if not (isinstance(value, Tensor) or (isinstance(value, tuple) and all(isinstance(t, Tensor) for t in value))):
        inside = [type(item).__name__ for item in value] if isinstance(value, tuple) else type(value).__name__
        raise TypeError(f"{what} must be a tensor or a tuple of tensors, got {inside}")


def scatter(value: Value, chunks: int) -> list[Value]:
    """Split into at most `chunks` micro-batches along dimension 0; if there is a remainder, the first ones are larger
    by one.

    Different `torch.chunk` it yields exactly min(chunks, samples) of them.
    """
    tensors = tensors_of(value)
    samples = {t.size(0) if t.dim() else 0 for t in tensors}
    if len(samples) != 1 or 0 in samples:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(f"inputs need the same number of samples (at least 1) in dimension 0, got shapes {shapes}")
    pieces = [torch.tensor_split(t, min(chunks, t.size(0))) for t in tensors]
    if not isinstance(value, tuple):
        return list(pieces[0])
    return [tuple(piece) for piece in zip(*pieces, strict=True)]


def gather(values: list[Value]) -> Value:
    """The inverse of `scatter`."""
    if isinstance(values[0], tuple):
        return tuple(torch.cat(column) for column in zip(*map(tensors_of, values), strict=True))
    return torch.cat([t for value in values for t in tensors_of(value)])
