"""The passes of a stage's micro-batches in an engine of ranks, and what waits between them.

    arrived (data)      --> forward  --> leaving (data)
    leaving (gradients) <-- backward <-- arrived (gradients)      from the loss in the last stage

Values are lists of tensors by their part: "" is what goes from layer to layer, others are skips. For tensors that have
no gradient, integers and masks, zeros come back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from harness.runtime.autograd import differentiable
from harness.runtime.stage_module import StageModule
from harness.runtime.values import Value, tensors_of

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""What goes from stage to stage; messages name a dtype by its place here."""


class StagePasses:
    """The passes of one stage in one step. It keeps inputs for their backward pass, and tensors that are still to be
    sent.

    An output that has left is not kept: the backward pass begins at its edge of the graph.
    """

    def __init__(self, stage: StageModule) -> None:
        self.stage = stage
        self.inputs: dict[int, dict[str, list[Tensor]]] = {}
        self.outputs: dict[int, dict[str, list[Tensor]]] = {}
        self.edges: dict[int, dict[str, list[GradientEdge | None]]] = {}
        self.gradients: dict[int, dict[str, list[Tensor]]] = {}

    def arrived(self, i: int, part: str, tensors: list[Tensor], forward: bool) -> None:
        """Take tensors of micro-batch i from another stage: activations with `forward`, else gradients."""
        values = self.inputs if forward else self.gradients
        if forward and part not in self.stage.ungraded_in:
            tensors = [one.requires_grad_(differentiable(one)) for one in tensors]
        values.setdefault(i, {})[part] = tensors

    def leaving(self, i: int, part: str, forward: bool) -> list[Tensor]:
        """Return the tensors to send to another stage, once their pass has ended. Each is returned once."""
        if forward:
            return [tensor.detach() for tensor in self.outputs[i].pop(part)]
        entered = self.inputs[i].pop(part)
        return [one.grad if one.grad is not None else torch.zeros_like(one) for one in entered]

    def forward(self, i: int, entering: Value | None) -> None:
        """`entering` is the model's own input, in the first stage."""
        own = tensors_of(entering) if entering is not None else self._flat(self.inputs[i], self.stage.arriving)
        out: Any = self.stage(*own)
        flat = [out] if isinstance(out, Tensor) else list(out)
        skips = self.stage.leaving
        several = len(flat) - len(skips)
        jumps = {name: [tensor] for name, tensor in zip(skips, flat[several:], strict=True)}
        self.outputs[i] = {"": flat[:several], **jumps}
        self.edges[i] = {part: [_edge(tensor) for tensor in tensors] for part, tensors in self.outputs[i].items()}
        if torch.is_grad_enabled():  # else the inputs are needed again
            self._forget_inputs(i)

    def _forget_inputs(self, i: int) -> None:
        """Release what comes from a frozen prefix: it gets no gradient, and the graph has what it has saved of it."""
        for part in self.stage.ungraded_in:
            self.inputs.get(i, {}).pop(part, None)

    def result(self, i: int) -> Value:
        """What the last stage gives of micro-batch i, as the loss takes it."""
        outputs = self.outputs[i][""]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def backward(self, i: int, loss: Tensor | None) -> None:
        """Run the backward pass of micro-batch i, from the loss or from the gradients that have arrived."""
        edges, gradients = self.starts(i, loss)
        if edges:
            torch.autograd.backward(edges, gradients)

    def starts(self, i: int, loss: Tensor | None) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return where the backward pass of micro-batch i begins, with the gradients there. Each is returned once."""
        edges = self.edges.pop(i)
        del self.outputs[i]
        if loss is not None:
            return ([get_gradient_edge(loss)], [torch.ones_like(loss)]) if loss.requires_grad else ([], [])
        arrived = self.gradients.pop(i, {})
        each = [pair for part, ones in arrived.items() for pair in zip(edges[part], ones, strict=True)]
        pairs = [(edge, one) for edge, one in each if edge is not None]
        return [edge for edge, _ in pairs], [one for _, one in pairs]

    @staticmethod
    def _flat(values: dict[str, list[Tensor]], skips: list[str]) -> list[Tensor]:
        return [tensor for part in ("", *skips) for tensor in values[part]]


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None
