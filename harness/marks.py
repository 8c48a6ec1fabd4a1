"""Marks in a backward pass: so it is known which layer it has come to, and in which one it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def mark(value: Any, reached: Callable[[], None]) -> None:
    """Have the backward pass call `reached` when the gradient of `value`, a tensor or a tuple of them, is there.

    The first tensor that requires a gradient stands for all; without any there is no mark.
    """
    for tensor in value if isinstance(value, tuple) else (value,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: reached())
            return
