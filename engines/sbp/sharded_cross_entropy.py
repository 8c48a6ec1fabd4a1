"""Cross entropy of logits whose classes lie on several devices (as Megatron-LM's vocabulary-parallel loss)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Digits
from harness.runtime.values import Value

REFUSED = (
    'a loss over split classes is a cross_entropy(..., reduction="sum") of targets that are classes'
    " -> planner.ends=batch_split, which splits the output by samples alone"
)


class SplitClasses(TorchFunctionMode):
    """Within it, `cross_entropy(logits, targets, reduction="sum")` is that over all devices of `digits`.

    `classes` are those that this device has. Raises ValueError for any other reduction, and for probabilities.
    """

    def __init__(self, classes: Tensor, total: int, digits: Digits, by: BlockCollectives) -> None:
        super().__init__()
        self.classes, self.digits, self.by, self.called = classes, digits, by, False
        self.place = torch.full((total,), -1, dtype=torch.long, device=classes.device)
        self.place[classes] = torch.arange(len(classes), device=classes.device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.cross_entropy:
            self.called = True
            return self._entropy(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """(n, classes here, ...), (n, ...) -> the sum, the same on every device; each has its own part of the gradient.

        The rest is as torch's; `weight` is of all classes.
        """
        if reduction != "sum" or (size_average, reduce) != (None, None) or target.is_floating_point():
            raise ValueError(REFUSED)
        logits = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        shifted = logits - self.by.largest(logits.amax(1), self.digits)[:, None]
        ignored = target == ignore_index
        classes = target.masked_fill(ignored, 0).flatten()
        weights = torch.ones_like(self.place, dtype=logits.dtype) if weight is None else weight
        place = self.place.index_select(0, classes).view_as(target)
        hit = shifted.gather(1, place.clamp(min=0)[:, None])[:, 0].masked_fill(place < 0, 0.0)
        parts = [shifted.exp().sum(1), hit]
        if label_smoothing:
            parts.append(torch.einsum("nc...,c->n...", shifted, weights[self.classes]))
        total, hit, *every = self.by.total(torch.stack(parts), self.digits)
        lost = (total.log() - hit) * weights[classes].view_as(target)
        for one in every:
            smooth = (weights.sum() * total.log() - one) / len(weights)
            lost = (1 - label_smoothing) * lost + label_smoothing * smooth
        return lost.masked_fill(ignored, 0.0).sum()


def split_loss(loss: Callable[[Any, Any], Tensor], output: Value, target: Value, mode: SplitClasses | None) -> Tensor:
    """The model's loss. Raises ValueError for one that split classes cannot have."""
    if mode is None:
        return loss(output, target)
    mode.called = False
    with mode:
        found = loss(output, target)
    if not mode.called:
        raise ValueError(REFUSED)
    return found
