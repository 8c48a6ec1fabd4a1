"""A gradient of zero for each weight that a pass does not use, where replicas may use different ones.

    replica 0   expert 0 of 2   gradients of  gate, expert 0                 with them   gate, expert 0, 0
    replica 1   expert 1 of 2   gradients of  gate,           expert 1                   gate, 0,        expert 1

Engines sum the gradients that are there, in the order in which they are there: this must be the same in all replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.runtime.values import rebuilt, tensors_of


def give_gradients(layers: Iterable[nn.Module]) -> None:
    """From now on all weights of each layer get a gradient in each pass, one after the other when the layer's own
    backward pass has run.

    They have a part in the layer's output: the sum of none of their elements. It is made before all else, and autograd
    goes back through what was made first at last.
    """
    for layer in dict.fromkeys(layers):
        part = _Part()
        layer.register_forward_pre_hook(part.before)
        layer.register_forward_hook(part.after)


class _Part:
    """The part of a layer's weights in its output."""

    nothing: Tensor | None = None

    def before(self, layer: nn.Module, _: Any) -> None:
        parts = [_real(weight.reshape(-1)[:0].sum()) for weight in layer.parameters() if weight.requires_grad]
        self.nothing = sum(parts, torch.zeros((), dtype=parts[0].dtype, device=parts[0].device)) if parts else None

    def after(self, _: nn.Module, __: Any, output: Any) -> Any:
        nothing, self.nothing = self.nothing, None
        outputs = list(tensors_of(output))
        first = next((number for number, tensor in enumerate(outputs) if tensor.is_floating_point()), None)
        if nothing is None or first is None:
            return output
        outputs[first] = outputs[first] + nothing.to(outputs[first])
        return rebuilt(output, outputs)


def _real(number: Tensor) -> Tensor:
    return number.real if number.is_complex() else number
