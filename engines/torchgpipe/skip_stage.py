"""A stage as torchgpipe takes it: one module that pops the skips which arrive, and stashes those which leave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torchgpipe import is_checkpointing, is_recomputing
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.skip.tracker import SkipTracker, current_skip_tracker

from harness.core.plan import Plan
from harness.interfaces import SessionSpec
from harness.nn.skip import frozen_prefix, layer_skips, named_layers
from harness.runtime.stage_module import StageModule


class SkipStage(nn.Module):
    """Hands its layers what arrives and takes what leaves. Skips inside the stage are none of torchgpipe's."""

    def __init__(self, layers: StageModule, seed: int) -> None:
        super().__init__()
        self.layers, self.seed = layers, seed
        self.begin(0)

    def begin(self, step: int) -> None:
        """The next forward pass, and the backward pass that follows, are those of this step."""
        self.step = step
        self.micro_batches: dict[SkipTracker, int] = {}

    def forward(self, value: Any) -> Any:
        """A tensor or a tuple of tensors to the same; a generator of torchgpipe's commands."""
        arrived = [value] if isinstance(value, Tensor) else [*value]
        for name in self.layers.arriving:
            arrived.append((yield pop(name)))
        self.layers.recomputes = is_checkpointing() or is_recomputing() or self.layers.in_place
        self.layers.at(self.seed, self.step, self._micro_batch(), again=is_recomputing())
        left = self.layers(*arrived)
        left = [left] if isinstance(left, Tensor) else [*left]
        skips = zip(self.layers.arriving, arrived[len(arrived) - len(self.layers.arriving) :], strict=True)
        if frozen := [one for name, one in skips if name in self.layers.ungraded_in and one.requires_grad]:
            left[0] = _WithZeros.apply(left[0], *frozen)
        for name in reversed(self.layers.leaving):
            yield stash(name, left.pop())
        return left[0] if len(left) == 1 else tuple(left)

    def _micro_batch(self) -> int:
        """Return the micro-batch of this call. torchgpipe does not pass it, but each has a skip tracker, also in
        recomputation.

        The first calls of a pass come in order.
        """
        return self.micro_batches.setdefault(current_skip_tracker(), len(self.micro_batches))


class _WithZeros(Function):
    """A value as it is; the backward pass gives zeros to skips of a frozen prefix: torchgpipe asserts a gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *frozen: Tensor) -> Tensor:
        ctx.like = [(one.shape, one.dtype, one.device) for one in frozen]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def stages(layers: nn.Sequential, plan: Plan, spec: SessionSpec) -> list[nn.Module]:
    """The plan's stages, each a `SkipStage` inside of torchgpipe's skippable module.

    Raises ValueError, naming the layers, where skips do not match.
    """
    named = named_layers(layers)
    skips, prefix = layer_skips(named), frozen_prefix(named)
    found = []
    for number, stage in enumerate(plan.stages):
        own = range(stage.first, stage.last + 1)
        touching = [s for s in skips if s.source in own or s.target in own]  # the others are none of this stage's
        module = StageModule(number, named[own.start : own.stop], own.start, touching, prefix)
        module.autocast = getattr(torch, spec.autocast) if spec.autocast else None
        of_theirs: Any = skippable(stash=module.leaving, pop=module.arriving)(SkipStage)
        found.append(of_theirs(module, spec.seed))
    return found
