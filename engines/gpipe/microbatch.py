"""Cutting a mini-batch into micro-batches, and putting it together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Value = Tensor | tuple[Tensor, ...]
Parts = dict[str, Any]  # what a stage takes or gives: "" is the layers' value, other keys are skips, each maybe None


def tensors_of(value: Value | None) -> tuple[Tensor, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def all_tensors(parts: Parts) -> list[Tensor]:
    """The tensors of all values and skips, in their order."""
    return [tensor for value in parts.values() for tensor in tensors_of(value)]


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `function` to every tensor of a value; None stays None."""
    if value is None:
        return None
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def check_value(value: object, what: str) -> None:
    """Raise TypeError unless `value` is a tensor or a tuple of tensors."""
    if not (isinstance(value, Tensor) or (isinstance(value, tuple) and all(isinstance(t, Tensor) for t in value))):
        inside = [type(item).__name__ for item in value] if isinstance(value, tuple) else type(value).__name__
        raise TypeError(f"{what} must be a tensor or a tuple of tensors, got {inside}")


def scatter(value: Value, chunks: int) -> list[Value]:
    """Split into at most `chunks` micro-batches along dimension 0; if there is a remainder, the first ones are larger
    by one.

    Different `torch.chunk` it yields exactly min(chunks, samples) of them. Tensors of a tuple may have different first
    sizes. Raises ValueError where that gives them different numbers of micro-batches.
    """
    tensors = tensors_of(value)
    counts = {min(chunks, t.size(0)) if t.dim() else 0 for t in tensors}
    if len(counts) != 1 or 0 in counts:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            "inputs need samples (at least 1) in dimension 0, and as many micro-batches each: got shapes "
            f"{shapes} for {chunks} chunks"
        )
    pieces = [torch.tensor_split(t, min(chunks, t.size(0))) for t in tensors]
    if not isinstance(value, tuple):
        return list(pieces[0])
    return [tuple(piece) for piece in zip(*pieces, strict=True)]


def gather(values: list[Value]) -> Value:
    """The inverse of `scatter`. Raises ValueError for a scalar, which has no dimension to be gathered along."""
    if any(not t.dim() for value in values for t in tensors_of(value)):
        raise ValueError(
            "the last layer gives a scalar for each micro-batch: outputs are gathered along dimension 0 -> give a "
            "value for each sample, and reduce what the pipeline returns"
        )
    if isinstance(values[0], tuple):
        return tuple(torch.cat(column) for column in zip(*map(tensors_of, values), strict=True))
    return torch.cat([t for value in values for t in tensors_of(value)])
