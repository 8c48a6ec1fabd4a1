"""Cross entropy of logits whose classes lie on several devices (as Megatron-LM's vocabulary-parallel loss)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engines.sbp.exchange import Exchanger
from engines.sbp.layout import Digits


class SplitClasses(TorchFunctionMode):
    """Within it, `cross_entropy(logits, targets, reduction="sum")` is that over all devices of `digits`.

    `classes` are those that this device has. Raises ValueError for any other reduction.
    """

    def __init__(self, classes: Tensor, total: int, digits: Digits, by: Exchanger) -> None:
        super().__init__()
        self.digits, self.by = digits, by
        self.place = torch.full((total,), -1, dtype=torch.long, device=classes.device)
        self.place[classes] = torch.arange(len(classes), device=classes.device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            if kwargs.get("reduction") != "sum":
                raise ValueError('a loss over split classes is cross_entropy(..., reduction="sum")')
            return self._entropy(args[0], args[1])
        return func(*args, **kwargs)

    def _entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(n, classes here), (n) -> the sum over n, the same on every device; each has its own part of the gradient."""
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        shifted = logits - self.by.largest(logits.amax(1), self.digits)[:, None]
        place = self.place[targets]
        hit = shifted.gather(1, place.clamp(min=0)[:, None])[:, 0] * (place >= 0)
        sums = self.by.total(torch.stack([shifted.exp().sum(1), hit]), self.digits)
        return (sums[0].log() - sums[1]).sum()


def split_loss(
    loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor, mode: SplitClasses | None
) -> Tensor:
    """The model's loss."""
    if mode is None:
        return loss(output, target)
    with mode:
        return loss(output, target)
