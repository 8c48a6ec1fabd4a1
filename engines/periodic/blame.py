"""Which layer an error in a backward pass comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.marks import mark
from harness.skip import named_layers
from harness.stage_module import StageModule


def failing_layer(module: StageModule, run: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor],
                  gradients: Sequence[Tensor | None]) -> str:  # fmt: skip
    """The name of the layer whose backward pass fails, "unknown" if none does.

    `run` does the forward task once more, this time with marks between the layers, to give the tensors that the
    backward pass begins with.
    """
    reached = ["unknown"]
    hooks = [layer.register_forward_hook(_marking(name, reached)) for name, layer in named_layers(module)]
    wanted = [tensor for tensor in (*leaves, *module.parameters()) if tensor.requires_grad]
    try:
        pairs = [(out, g) for out, g in zip(run(), gradients, strict=True) if g is not None and out.requires_grad]
        torch.autograd.grad([out for out, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    except Exception:  # the same one again: the last mark says where
        return reached[-1]
    finally:
        for hook in hooks:
            hook.remove()
    return "unknown"


def _marking(name: str, reached: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    """A forward hook: once the backward pass comes to this layer, its name is noted."""
    return lambda layer, inputs, output: mark(output, lambda: reached.append(name))
