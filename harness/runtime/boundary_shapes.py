"""Shapes of the tensors sent from stage to stage, found without computing anything."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from harness.core.plan import Plan
from harness.runtime.autograd import differentiable
from harness.runtime.stage_module import stage_modules

Boundary = tuple[Tensor, ...]
"""Tensors on the meta device; those that get a gradient require one."""


class BoundaryShapes:
    """Remembers all layers, without memory, until the first batch says how large a micro-batch is.

    They pretend to be on `device`: under autocast, what dtype leaves a layer depends on the device.
    """

    def __init__(self, layers: nn.Sequential, plan: Plan, device: torch.device, autocast: torch.dtype | None) -> None:
        self.mode, self.device = FakeTensorMode(allow_non_fake_inputs=True), device
        fakes = {
            id(tensor): FakeTensor(self.mode, tensor.detach().to("meta").requires_grad_(tensor.requires_grad), device)
            for tensor in (*layers.parameters(), *layers.buffers(), *_attributes(layers))
        }
        self.stages = stage_modules(copy.deepcopy(layers, fakes), plan, range(len(plan.stages)))
        for stage in self.stages:
            stage.autocast = autocast

    def boundaries(self, inputs: tuple[Tensor, ...]) -> list[Boundary]:
        """Return the inputs of each stage, and then the outputs of the last one, for the micro-batch `inputs`."""
        with self.mode, torch.no_grad():
            values = tuple(torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in inputs)
            found = [tuple(_example(tensor, False) for tensor in values)]
            for stage in self.stages:
                left = stage(*values)
                values = left if isinstance(left, tuple) else (left,)
                parts = [""] * (len(values) - len(stage.leaving)) + stage.leaving
                graded = [part not in stage.ungraded_out for part in parts]
                found.append(tuple(map(_example, values, graded)))
        return found


def _attributes(layers: nn.Module) -> list[Tensor]:
    """Tensors that are plain attributes: one that was computed, as by weight_norm, cannot be copied."""
    return [value for module in layers.modules() for value in vars(module).values() if isinstance(value, Tensor)]


def _example(tensor: Tensor, graded: bool) -> Tensor:
    gradient = graded and differentiable(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=gradient)
