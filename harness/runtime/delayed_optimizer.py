"""The optimizer of a stage whose gradients are late, with the corrections of `harness.core.staleness`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.staleness import Corrections
from harness.interfaces import OptimizerSpec
from harness.runtime.stage_module import StageModule
from harness.runtime.training_state import load_optimizer_state, make_optimizer, newest_state, optimizer_state

LAST = "last_update"
"""The key of the last update in the optimizer's state of a parameter: so it is saved and loaded with it."""
MEAN = "mean_change"
"""That of the moving average of a weight's changes."""


class DelayedOptimizer:
    """Updates `parameters`, the newest weights, from their gradients."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec, corrections: Corrections) -> None:
        self.parameters = list(parameters.values())
        self.corrections, self.lr = corrections, spec.lr
        self.optimizer = make_optimizer(self.parameters, spec)

    def step(self, delay: int, number: int) -> None:
        """Make update `number` of the run, counted from 0, from gradients that are `delay` updates late; they are gone
        afterwards."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.corrections.lr_factor(delay, number)
        if self.corrections.kept:
            self._step_and_keep(delay)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _step_and_keep(self, delay: int) -> None:
        updated = [parameter for parameter in self.parameters if parameter.grad is not None]
        before = [parameter.detach().clone() for parameter in updated]
        self.optimizer.step()
        for parameter, old in zip(updated, before, strict=True):
            update, state = parameter - old, self.optimizer.state[parameter]
            if (repeated := self.corrections.repeated(delay)) and LAST in state:
                parameter.add_(update - state[LAST], alpha=repeated)
            if self.corrections.keeps_update:
                state[LAST] = update
            if self.corrections.discrepancy:
                gamma = self.corrections.gamma(delay)
                change = (parameter - old) * (1 - gamma)
                state[MEAN] = change.add_(state[MEAN], alpha=gamma) if MEAN in state else change

    @torch.no_grad()
    def weights(self, distance: int) -> Iterator[Tensor]:
        """The newest weights, moved by so many updates: predicted ones, or, where it is negative, earlier ones."""
        for parameter in self.parameters:
            yield moved(parameter, self.movement(parameter), distance)

    def movement(self, parameter: nn.Parameter) -> Tensor | None:
        """What stands for an update of a weight, to move it: the last one, or the mean change where discrepancies are
        corrected; None before the first update."""
        state = self.optimizer.state
        return state[parameter].get(MEAN if self.corrections.discrepancy else LAST) if parameter in state else None


class NewestWeights(ABC):
    """A stage whose newest weights are the optimizer's (`own`), whatever its layers compute with."""

    own: dict[str, nn.Parameter]
    optimizer: DelayedOptimizer

    @property
    @abstractmethod
    def newest_module(self) -> StageModule:
        """The layers whose buffers, and weights without an own one, are the newest."""

    def state(self) -> dict[str, Tensor]:
        """The state dict of the newest weights."""
        return newest_state(self.newest_module, self.own)

    def optimizer_state(self) -> dict[str, Any]:
        return optimizer_state(self.own, [self.optimizer.optimizer])

    @torch.no_grad()
    def load(self, model: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """The inverse of `state` and `optimizer_state`, from those of the whole model."""
        module = self.newest_module
        module.load_state_dict({name: model[name] for name in module.state_dict()})
        for own, parameter in zip(self.own.values(), module.parameters(), strict=True):
            own.copy_(parameter)
        load_optimizer_state(self.own, [self.optimizer.optimizer], optimizer)


def whole_state(stages: Sequence[NewestWeights], names: Sequence[str]) -> dict[str, Any]:
    """The state of all stages with their newest weights; the optimizer's in the order of the parameters' `names`."""
    optimizer = dict(ChainMap(*(stage.optimizer_state() for stage in stages)))
    return {
        "model": {name: value for stage in stages for name, value in stage.state().items()},
        "optimizer": {name: optimizer[name] for name in names if name in optimizer},
    }


def moved(weight: Tensor, update: Tensor | None, distance: int) -> Tensor:
    """The weight after so many more updates like this one, or before them."""
    return weight if update is None or not distance else torch.add(weight, update, alpha=distance)
