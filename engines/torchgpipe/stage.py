"""A stage as torchgpipe takes it: one module that pops the skips which arrive, and stashes those which leave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchgpipe import is_recomputing
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.skip.tracker import SkipTracker, current_skip_tracker

from harness import batchnorm, dropout, skip
from harness.interfaces import SessionSpec
from harness.plan import Plan
from harness.skip import layer_skips, named_layers


class Stage(nn.Module):
    """Layers of one stage, under their names in the whole model. Skips inside the stage are none of torchgpipe's."""

    def __init__(
        self,
        number: int,
        layers: Sequence[tuple[str, nn.Module]],
        arriving: Sequence[str],
        device: str,
        spec: SessionSpec,
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(OrderedDict(layers))
        self.number, self.arriving, self.spec = number, list(arriving), spec
        self.device_type = torch.device(device).type
        self.in_place = any(getattr(module, "inplace", False) for module in self.modules())
        self.begin(0)

    def begin(self, step: int) -> None:
        """The next forward pass, and the backward pass that follows, are those of this step."""
        self.step = step
        self.micro_batches: dict[SkipTracker, int] = {}

    def forward(self, value: Any) -> Any:
        """A tensor or a tuple of tensors to the same; a generator of torchgpipe's commands."""
        arrived = {}
        for name in self.arriving:
            arrived[name] = yield pop(name)
        value, leaving = self._run(value, arrived)
        for name, tensor in leaving.items():
            yield stash(name, tensor)
        return value

    def _run(self, value: Any, arrived: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        if self.in_place:  # what arrives may be needed again
            value = value.clone() if isinstance(value, Tensor) else tuple(tensor.clone() for tensor in value)
            arrived = {name: tensor.clone() for name, tensor in arrived.items()}
        micro_batch = self._micro_batch()
        with self._around(micro_batch), skip.carried(arrived) as skips:
            return self._layers(value, micro_batch), dict(skips)

    def _micro_batch(self) -> int:
        """Which one this call is for. torchgpipe does not say, but each has a skip tracker, also when it is recomputed.

        The first calls of a pass come in order.
        """
        return self.micro_batches.setdefault(current_skip_tracker(), len(self.micro_batches))

    @contextmanager
    def _around(self, micro_batch: int) -> Iterator[None]:
        """Settings of the thread, which is one of torchgpipe's or of autograd's."""
        dtype = getattr(torch, self.spec.autocast) if self.spec.autocast else None
        cast = torch.autocast(self.device_type, dtype) if dtype else nullcontext()
        again = batchnorm.throwaway(batchnorm.statistics(self.modules())) if is_recomputing() else nullcontext()
        with cast, again, dropout.keyed(self.spec.seed, self.step, micro_batch):
            yield

    def _layers(self, value: Any, micro_batch: int) -> Any:
        for name, layer in named_layers(self.layers):
            try:
                value = layer(value)
            except Exception as error:
                phase = "recomputation" if is_recomputing() else "forward"
                error.add_note(f"in stage {self.number}, layer {name!r}, micro-batch {micro_batch}, {phase}")
                raise
        return value


def stages(layers: nn.Sequential, plan: Plan, spec: SessionSpec) -> list[nn.Module]:
    """The plan's stages, each a `Stage` inside of torchgpipe's skippable module.

    Raises ValueError, naming the layers, where skips do not match.
    """
    named = named_layers(layers)
    skips = layer_skips(named)
    found = []
    for number, stage in enumerate(plan.stages):
        own = range(stage.first, stage.last + 1)
        arriving = [s.name for s in skips if s.target in own and s.source not in own]
        leaving = [s.name for s in skips if s.source in own and s.target not in own]
        of_theirs: Any = skippable(stash=leaving, pop=arriving)(Stage)
        found.append(of_theirs(number, named[own.start : own.stop], arriving, spec.devices[stage.device], spec))
    return found
