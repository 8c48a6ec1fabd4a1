"""A PipelineModule that takes the plan's cut, and ties any parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn
from torch.autograd import Function

from harness.runtime.tied_weights import TiedWeights


class Stages(PipelineModule):
    """A PipelineModule each of whose "layers" is a stage of the plan, so that each is one activation checkpoint.

    Rank = replica * stages + stage. `ties` are parameters that stages share; DeepSpeed knows only whole layers that do.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        replicas: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        recompute: bool,
        ties: TiedWeights,
    ) -> None:
        topology = ProcessTopology(axes=["data", "pipe"], dims=[replicas, len(stages)])
        self.shared = ties
        super().__init__(
            layers=[OnePass(stage) if j < len(stages) - 1 else stage for j, stage in enumerate(stages)],
            topology=topology,
            loss_fn=loss,
            activation_checkpoint_interval=int(recompute),
        )

    def _partition_layers(self, method: str = "") -> None:
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(range(self.num_stages + 1))
        self._set_bounds(start=stage, stop=stage + 1)

    def _is_checkpointable(self, funcs: Sequence[Any]) -> bool:
        return True

    def train(self, mode: bool = True) -> Stages:
        """Modules keep their own flags, as in other engines: DeepSpeed calls this in each step, and a part of the
        model may be left in evaluation, as a frozen teacher is."""
        return self

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, Any]]:
        """DeepSpeed sums these gradients over the ranks of each group, and leaves out a weight without one: of a copy
        that no layer of the stage has used it is zero, as the other ranks wait."""
        found = self.shared.weights_and_groups()
        for weight, _ in found:
            if weight.requires_grad and weight.grad is None and getattr(weight, "_hp_grad", None) is None:
                weight.grad = torch.zeros_like(weight)
        return found


class OnePass(nn.Module):
    """A stage whose outputs need one backward pass, not one for each.

    DeepSpeed calls backward for each tensor of a tuple, so that a stage with k skips would go back k times through the
    same layers. All but the last one are leaves here; the last one's pass takes what they have gathered.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Any) -> Any:
        outputs = self.stage(*inputs)
        if isinstance(outputs, Tensor):
            return outputs
        floating = [t for t in outputs if t.is_floating_point()]
        if len(floating) < 2:
            return outputs
        leaves = [t.detach().requires_grad_() for t in floating[:-1]]
        last = _Gather.apply(leaves, floating[-1], *floating[:-1])
        replaced = iter([*leaves, last])
        return tuple(next(replaced) if t.is_floating_point() else t for t in outputs)


class _Gather(Function):
    """Passes the last output on; backwards it hands every output its gradient."""

    @staticmethod
    def forward(ctx: Any, leaves: list[Tensor], last: Tensor, *others: Tensor) -> Tensor:
        ctx.leaves = leaves
        return last.view_as(last)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        leaves, ctx.leaves = ctx.leaves, []
        return None, gradient, *(leaf.grad for leaf in leaves)
