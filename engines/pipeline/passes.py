"""The passes of a stage's micro-batches: as `harness.runtime.stage_passes`, and recomputed, and in halves.

F (without a graph) ... R   B         the inputs of a recomputed micro-batch stay, its graph is made by R
F ... I ... W                         I leaves what W needs: `harness.runtime.split_backward`
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.runtime.split_backward import SplitBackward
from harness.runtime.stage_module import StageModule
from harness.runtime.stage_passes import StagePasses
from harness.runtime.values import Value


class Passes(StagePasses):
    """The passes of one stage in one step."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__(stage)
        self.halves: dict[int, SplitBackward] = {}

    def forward_without_graph(self, i: int, entering: Value | None) -> None:
        """Run the forward pass of a micro-batch that is recomputed."""
        with torch.no_grad():
            self.forward(i, entering)

    def recompute(self, i: int, entering: Value | None) -> None:
        """Run the forward pass again, for its graph; its outputs have left, but for those of the last stage."""
        self.forward(i, entering)

    def backward_inputs(self, i: int, loss: Tensor | None) -> None:
        """Run the half of the backward pass for the gradients of the inputs."""
        edges, gradients = self.starts(i, loss)
        inputs = [one for tensors in self.inputs.get(i, {}).values() for one in tensors]
        self.halves[i] = SplitBackward(edges, gradients, inputs)
        self.halves[i].of_inputs()

    def backward_weights(self, i: int) -> None:
        """Run the half for the gradients of the weights."""
        self.halves.pop(i).of_weights()
