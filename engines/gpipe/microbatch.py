"""Cutting a mini-batch into micro-batches, and putting it together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.runtime.values import Form, Value, distinct, rebuilt, tensors_of

Parts = dict[str, Any]  # what a stage takes or gives: "" is the layers' value, other keys are skips, each maybe None


def all_tensors(parts: Parts) -> list[Tensor]:
    """The tensors of all values and skips, in their order."""
    return [tensor for value in parts.values() for tensor in tensors_of(value)]


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
    form = Form.of(value)
    pieces = [torch.tensor_split(t, min(chunks, t.size(0))) for t in distinct(value)]
    return [form.built(piece) for piece in zip(*pieces, strict=True)]


def gather(values: list[Value]) -> Value:
    """The inverse of `scatter`. Raises ValueError for a scalar, which has no dimension to be gathered along."""
    if any(not t.dim() for value in values for t in tensors_of(value)):
        raise ValueError(
            "the last layer gives a scalar for each micro-batch: outputs are gathered along dimension 0 -> give a "
            "value for each sample, and reduce what the pipeline returns"
        )
    columns = [torch.cat(column) for column in zip(*map(tensors_of, values), strict=True)]
    return rebuilt(values[0], columns)
