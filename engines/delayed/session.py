"""A model in training with delayed weights, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engines.delayed.delayed_stage import DelayedStage
from harness.core.plan import Plan
from harness.core.staleness import Delay, delay, ended
from harness.interfaces import Batch, Model, SessionSpec
from harness.nn.tied import moved
from harness.runtime.delayed_optimizer import whole_state
from harness.runtime.gradient_norms import UpdateNorms
from harness.runtime.local_session import LocalSession
from harness.runtime.stage_module import stage_modules
from harness.runtime.training_state import split_batch
from harness.runtime.values import Value, placed, tensors_of

if TYPE_CHECKING:
    from engines.delayed.engine import Config

PIPELINE = "delayed_pipeline"
"""The key of a state with what is in flight: older weights, and what has been updated when."""


class DelayedSession(LocalSession):
    """Stages that compute one after the other, each with the weights that it would have in the pipeline.

    `updates` have been made in the run, and `first` of them when the pipeline was last empty. `finished[-n]` is the
    number of updates that were made when the n-th last micro-batch had been through.
    """

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config, every: int) -> None:
        super().__init__(model, plan, spec)
        self.config, self.every = config, every
        self.flights, self.ways_back = config.flights(), config.ways_back()
        self.updates, self.first = 0, 0
        self.finished: list[int] = []

    def build(self, layers: nn.Sequential) -> None:
        self.parameter_names = [name for name, _ in layers.named_parameters()]
        modules = stage_modules(moved(layers, self.device), self.plan, range(len(self.plan.stages)))
        self.stages = [DelayedStage(module, self.spec, self.config.corrections) for module in modules]
        names = {parameter: name for name, parameter in self.named_parameters().items()}
        self.norms = UpdateNorms([stage.optimizer.optimizer for stage in self.stages], names)

    def train_step(self, batch: Batch) -> float:
        self.norms.begin()
        for stage in self.stages:
            stage.module.zero_grad(set_to_none=True)  # of a step that failed
        if self.config.drain:
            self._drain()
        parts = split_batch(batch, min(self.plan.micro_batches, len(batch)))
        losses, shares = [], []
        for begin in range(0, len(parts), self.every):
            group = parts[begin : begin + self.every]
            samples = sum(map(len, group))
            late = [0] * len(self.stages)
            for i, part in enumerate(group, begin):
                delays = self.delays([self._end(way, i, begin, len(parts)) for way in self.ways_back])
                losses.append(self._task(i, part, delays, samples))
                shares.append(samples / len(batch))
                late = [max(pair) for pair in zip(late, (one.updates for one in delays), strict=True)]
                self._finish(i == begin + len(group) - 1)
            self._update(begin + len(group) - 1, late)
        return sum(loss * share for loss, share in zip(torch.stack(losses).tolist(), shares, strict=True))

    def _drain(self) -> None:
        self.first, self.finished = self.updates, []
        for stage in self.stages:
            stage.drain()

    def delays(self, ends: Sequence[int]) -> list[Delay]:
        """The weights of the next micro-batch in each stage, which has made `ends` updates when that ends its way."""
        return [
            self._delay(flight, self.updates, self.finished, end)
            for flight, end in zip(self.flights, ends, strict=True)
        ]

    def _delay(self, flight: int, updates: int, finished: list[int], end: int = 0) -> Delay:
        before = finished[-flight] if flight <= len(finished) else self.first
        return delay(self.config.versions, updates, before, updates, self.first, end)

    def _end(self, way_back: int, i: int, begin: int, micro_batches: int) -> int:
        """Updates of a stage when micro-batch i of a step ends its way; its group begins with micro-batch `begin`."""
        if self.config.drain:
            return self.first + ended(i, way_back, self.every, micro_batches)
        return self.updates + ended(i - begin, way_back, self.every)

    def _finish(self, ends_group: bool) -> None:
        """A micro-batch has been through all stages."""
        self.finished = [*self.finished, self.updates + ends_group][-max(self.flights) :]

    def _update(self, i: int, late: list[int]) -> None:
        """Update all stages, after micro-batch i."""
        number = self.updates
        for stage, flight, one in zip(self.stages, self.flights, late, strict=True):
            kept_since = self._delay(flight, number + 1, self.finished).forward
            with self._task_of(stage, "step", i):
                stage.update(one, number, kept_since)
        self.updates += 1

    def _task(self, i: int, part: Batch, delays: list[Delay], samples: int) -> Tensor:
        """Forward and backward of micro-batch i through all stages; return its share of its group's loss."""
        value: tuple[Tensor, ...] = tensors_of(placed(part.inputs, self.device))
        tasks: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        for stage, one in zip(self.stages, delays, strict=True):
            with self._task_of(stage, "F", i):
                stage.use(one.forward, self.updates, self.config.corrections.ahead(one)[0])
                leaves = stage.module.leaves(value) if stage.number else value
                outs = self._outputs(stage, i, leaves, part.targets, samples)
                graded = stage.number and "" not in stage.module.ungraded_in
                tasks.append((leaves if graded else (), outs if stage.module.has_backward else ()))
                value = tuple(out.detach() for out in outs)
        gradients: tuple[Tensor | None, ...] = (torch.ones_like(value[0]),)
        for stage, one in zip(reversed(self.stages), reversed(delays), strict=True):
            with self._task_of(stage, "B", i):
                if not stage.module.has_backward:
                    continue
                if one.backward != one.forward:
                    stage.use(one.backward, self.updates, self.config.corrections.ahead(one)[1])
                leaves, outs = tasks.pop()
                _backward(outs, gradients)
                gradients = tuple(leaf.grad for leaf in leaves) if stage.number else ()
        return value[0]

    def _outputs(
        self, stage: DelayedStage, i: int, leaves: tuple[Tensor, ...], targets: Value, samples: int
    ) -> tuple[Tensor, ...]:
        stage.module.at(self.spec.seed, self.steps, i)
        out = stage.module(*leaves)
        if stage is not self.stages[-1]:
            return tensors_of(out)
        return (self.model.loss(out, placed(targets, self.device)) / samples,)

    def held_tensors(self) -> list[Tensor]:
        return [tensor for stage in self.stages for tensor in stage.held()]

    @property
    def pass_modules(self) -> nn.Module:
        return nn.ModuleList([stage.module for stage in self.stages])

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the newest weights."""
        return {name: parameter for stage in self.stages for name, parameter in stage.own.items()}

    def gradient_norms(self) -> dict[str, float]:
        return self.norms.norms()

    def local_state(self) -> dict[str, Any]:
        """Return the state with the newest weights, and what is in flight."""
        return {
            **whole_state(self.stages, self.parameter_names),
            PIPELINE: {
                "of": self._pipeline(),
                "updates": self.updates,
                "first": self.first,
                "finished": self.finished,
                "stages": [stage.older_state() for stage in self.stages],
            },
        }

    def _pipeline(self) -> list[Any]:
        """What a state must be of to go on with what is in flight."""
        return [self.config.versions, self.flights, self.every, self.config.drain, self.config.corrections.prediction]

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Take a state; from one of another engine, or of other stages, an empty pipeline goes on."""
        for stage in self.stages:
            stage.load(state["model"], state["optimizer"])
        self.updates = self.first = state["step"] * (self.plan.micro_batches // self.every)
        self.finished = []
        kept = state.get(PIPELINE, {})
        if kept.get("of") != self._pipeline():
            return
        self.updates, self.first, self.finished = kept["updates"], kept["first"], list(kept["finished"])
        for stage, older in zip(self.stages, kept["stages"], strict=True):
            stage.load_older(older)

    @contextmanager
    def _task_of(self, stage: DelayedStage, kind: str, i: int) -> Iterator[None]:
        """Record a task of a stage, which an error inside names."""
        self.stage_number = stage.number
        with self.span(kind, i):
            yield


def _backward(outs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
    pairs = [(o, g) for o, g in zip(outs, gradients, strict=True) if o.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
