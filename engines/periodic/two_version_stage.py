"""A stage with two versions of its weights, and one optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engines.periodic.weight_versions import VERSIONS
from harness.interfaces import SessionSpec
from harness.runtime.stage_module import StageModule
from harness.runtime.training_state import (
    load_optimizer_state,
    make_optimizer,
    model_state,
    optimizer_state,
    optimizer_tensors,
)


class TwoVersionStage:
    """The layers twice, on `device`, where `module` is already: same buffers (running statistics), own parameters.
    Used by one queue, or between steps.

    The optimizer owns parameters of its own, which look at the newest version: its state is one, whichever that is.

        copies[0]  W0 ---- group 0 ----> W1 ---- group 2 ----> W3
        copies[1]  W0 ----------- group 1 ----> W2 ---- group 3 ---->
        own           ------------------> W1 ---> W2 --------> W3
    """

    def __init__(self, module: StageModule, device: torch.device, spec: SessionSpec) -> None:
        self.number, self.device = module.number, device
        module.autocast = getattr(torch, spec.autocast) if spec.autocast else None
        self.copies = (module, _twin(module))
        self.newest = 0
        self.own = {
            name: nn.Parameter(parameter.data, parameter.requires_grad) for name, parameter in module.named_parameters()
        }
        self.optimizer = make_optimizer(self.own.values(), spec.optimizer)

    def begin(self) -> None:
        """A step begins: both versions are the newest, and there are no gradients."""
        for copied in self.copies:
            copied.zero_grad(set_to_none=True)
        self._renew(1 - self.newest)

    def version(self, group: int) -> StageModule:
        """The layers that a group of micro-batches computes with."""
        return self.copies[group % VERSIONS]

    def update(self, group: int) -> None:
        """The newest weights and the gradient of a group make the next weights, in the place of the group's own."""
        place = group % VERSIONS
        if place != self.newest:
            self._renew(place)
        self._look_at(place)
        for own, parameter in zip(self.own.values(), self.copies[place].parameters(), strict=True):
            own.grad = parameter.grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.copies[place].zero_grad(set_to_none=True)

    def held(self) -> Iterator[Tensor]:
        """Every tensor that the stage keeps between steps."""
        for copied in self.copies:
            yield from copied.parameters()
        yield from self.copies[0].buffers()
        yield from optimizer_tensors([self.optimizer])

    def state(self) -> dict[str, Tensor]:
        """The state dict of the newest version."""
        return model_state(self.copies[self.newest])

    def optimizer_state(self) -> dict[str, Any]:
        return optimizer_state(self.own, [self.optimizer])

    def load(self, model: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """The inverse of `state` and `optimizer_state`, from those of the whole model."""
        module = self.copies[self.newest]
        module.load_state_dict({name: model[name] for name in module.state_dict()})
        self._look_at(self.newest)
        load_optimizer_state(self.own, [self.optimizer], optimizer)

    def _renew(self, place: int) -> None:
        """Copy the newest weights into the version at `place`."""
        pairs = zip(self.copies[place].parameters(), self.copies[self.newest].parameters(), strict=True)
        with torch.no_grad():
            for parameter, newest in pairs:
                parameter.copy_(newest)

    def _look_at(self, place: int) -> None:
        self.newest = place
        for own, parameter in zip(self.own.values(), self.copies[place].parameters(), strict=True):
            own.data = parameter.data


def _twin(module: StageModule) -> StageModule:
    """Copy the layers with parameters of their own; buffers are shared, also those that a layer replaces."""
    twin = copy.deepcopy(module)
    for copied, original in zip(twin.modules(), module.modules(), strict=True):
        copied._buffers = original._buffers
    return twin
