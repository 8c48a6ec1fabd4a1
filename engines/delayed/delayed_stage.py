"""A stage that computes with older weights than its newest ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.core.staleness import Corrections
from harness.interfaces import SessionSpec
from harness.runtime.delayed_optimizer import DelayedOptimizer, NewestWeights, moved
from harness.runtime.stage_module import StageModule
from harness.runtime.training_state import optimizer_tensors


class DelayedStage(NewestWeights):
    """Layers that compute (`module`), their newest weights (`own`), and older ones: `history[k]` after k updates, each
    with the update that made it if micro-batches predict from them."""

    def __init__(self, module: StageModule, spec: SessionSpec, corrections: Corrections) -> None:
        self.number, self.predicts = module.number, corrections.prediction
        module.autocast = getattr(torch, spec.autocast) if spec.autocast else None
        self.module = module
        self.own = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in module.named_parameters()}
        self.optimizer = DelayedOptimizer(self.own, spec.optimizer, corrections)
        self.holds: tuple[int, int] | None = None
        self.history: dict[int, list[tuple[Tensor, Tensor | None]]] = {}

    @torch.no_grad()
    def use(self, version: int, newest: int, ahead: int) -> None:
        """Compute with the weights after `version` updates from now on, moved `ahead` updates further."""
        if self.holds == (version, ahead):
            return
        self.holds = version, ahead
        kept = self.history[version] if version < newest else self._newest(moving=ahead != 0)
        for parameter, (weight, update) in zip(self.module.parameters(), kept, strict=True):
            parameter.data.copy_(moved(weight, update, ahead))

    def _newest(self, moving: bool) -> list[tuple[Tensor, Tensor | None]]:
        movement = self.optimizer.movement
        return [(own.detach(), movement(own) if moving else None) for own in self.own.values()]

    def update(self, delay: int, number: int, kept_since: int) -> None:
        """Make update `number` of the run; weights after fewer than `kept_since` updates are needed no more."""
        if kept_since <= number:
            self.history[number] = [(weight.clone(), update) for weight, update in self._newest(self.predicts)]
        for old in [version for version in self.history if version < kept_since]:
            del self.history[old]
        for own, parameter in zip(self.own.values(), self.module.parameters(), strict=True):
            own.grad, parameter.grad = parameter.grad, None
        self.optimizer.step(delay, number)

    def drain(self) -> None:
        """No micro-batch needs older weights any more."""
        self.history = {}

    def held(self) -> list[Tensor]:
        """Every tensor that the stage keeps between steps."""
        older = [tensor for kept in self.history.values() for pair in kept for tensor in pair if tensor is not None]
        state = optimizer_tensors([self.optimizer.optimizer])
        return [*self.module.parameters(), *self.module.buffers(), *self.own.values(), *state, *older]

    @property
    def newest_module(self) -> StageModule:
        return self.module

    def older_state(self) -> dict[int, list[list[Tensor | None]]]:
        """The older weights, on the CPU."""
        return {
            version: [[None if tensor is None else tensor.detach().cpu().clone() for tensor in pair] for pair in kept]
            for version, kept in self.history.items()
        }

    def load_older(self, state: dict[int, list[list[Tensor | None]]]) -> None:
        """The inverse of `older_state`."""
        devices = [parameter.device for parameter in self.own.values()]
        for version, kept in state.items():
            self.history[version] = [
                (_moved(weight, device), None if update is None else update.to(device))
                for (weight, update), device in zip(kept, devices, strict=True)
            ]

    def load(self, model: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """As in every stage; older weights are forgotten."""
        super().load(model, optimizer)
        self.holds, self.history = None, {}


def _moved(weight: Tensor | None, device: torch.device) -> Tensor:
    assert weight is not None
    return weight.to(device)
