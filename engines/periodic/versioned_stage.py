"""A stage with several versions of its weights, and one optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engines.periodic.weight_versions import CopyPlan
from harness.core.staleness import Corrections
from harness.interfaces import SessionSpec
from harness.runtime.delayed_optimizer import DelayedOptimizer, NewestWeights
from harness.runtime.stage_module import StageModule
from harness.runtime.training_state import optimizer_tensors


class VersionedStage(NewestWeights):
    """The layers once or several times, on `device`, where `module` is already: same buffers (running statistics), own
    parameters. Used by one queue, or between steps.

    The optimizer owns parameters of its own. They look at the copy with the newest version: its state is one, whichever
    that is. Where micro-batches compute with weights that corrections have moved, the newest are apart from all copies.

        copies[0]  W0 -- groups 0, 1 --> W2 ---- group 3 ---->      engine.versions=2bw
        copies[1]          W1 ---- group 2 ----> W3
        own        W0 ---> W1 ---------> W2 ---> W3
    """

    def __init__(self, module: StageModule, device: torch.device, spec: SessionSpec, corrections: Corrections) -> None:
        self.number, self.device, self.apart = module.number, device, corrections.apart
        module.autocast = getattr(torch, spec.autocast) if spec.autocast else None
        self.copies = [module]
        self.newest = 0
        self.own = {
            name: nn.Parameter(p.detach().clone() if self.apart else p.data, p.requires_grad)
            for name, p in module.named_parameters()
        }
        self.optimizer = DelayedOptimizer(self.own, spec.optimizer, corrections)

    def prepare(self, plan: CopyPlan) -> None:
        """Have as many copies as the next steps need."""
        self.plan = plan
        self.copies += [_twin(self.copies[0]) for _ in range(plan.count - len(self.copies))]

    def begin(self, updates: int) -> None:
        """A step begins, after so many updates of the run."""
        self.updates = updates
        self.optimizer.optimizer.zero_grad(set_to_none=True)
        for copied in self.copies:
            copied.zero_grad(set_to_none=True)
        if self.apart:
            self._predict(0)
        elif (first := self.plan.newest[0]) != self.newest:
            self.copies[first], self.copies[self.newest] = self.copies[self.newest], self.copies[first]
            self.newest = first

    def forward_module(self, i: int) -> StageModule:
        """The layers with the weights for the forward task of micro-batch i."""
        self._move_now(self.plan.ahead[i][0])
        return self.module(i)

    @contextmanager
    def backward(self, i: int) -> Iterator[None]:
        """Within it the layers have the weights for the backward task of micro-batch i, and the gradients of its group
        before it, to which the task adds its own."""
        self._move_now(self.plan.ahead[i][1])
        pairs = list(zip(self.module(i).parameters(), self.own.values(), strict=True))
        for parameter, own in pairs:
            parameter.grad = own.grad
        yield
        for parameter, own in pairs:
            own.grad, parameter.grad = parameter.grad, None

    def module(self, i: int) -> StageModule:
        """The layers that micro-batch i computes with."""
        return self.copies[self.plan.copies[i]]

    def update(self, group: int) -> None:
        """The newest weights and the gradient of a group make the next weights."""
        if not self.apart and (place := self.plan.newest[group + 1]) != self.newest:
            self._write(place, self.own.values())
            self._look_at(place)
        self.optimizer.step(self.plan.late[group], self.updates + group)
        if self.apart:
            self._predict(group + 1)

    def held(self) -> Iterator[Tensor]:
        """Every tensor that the stage keeps between steps."""
        for copied in self.copies:
            yield from copied.parameters()
        yield from self.own.values() if self.apart else ()
        yield from self.copies[0].buffers()
        yield from optimizer_tensors([self.optimizer.optimizer])

    @property
    def newest_module(self) -> StageModule:
        return self.copies[self.newest]

    def _predict(self, update: int) -> None:
        """After so many updates of the step: write what later micro-batches predict from these weights."""
        for place, ahead in self.plan.predicted[update]:
            self._write(place, self.optimizer.weights(ahead))

    def _move_now(self, ahead: int) -> None:
        """Without versions the only copy gets its weights before each task."""
        if self.apart and not any(self.plan.predicted):
            self._write(0, self.optimizer.weights(ahead))

    def _write(self, place: int, weights: Iterable[Tensor]) -> None:
        """Write into a copy what may still belong to the graph of a forward task, as versions=none wants it."""
        for parameter, value in zip(self.copies[place].parameters(), weights, strict=True):
            parameter.data.copy_(value.detach())

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
