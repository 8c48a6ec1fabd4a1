"""A stage as one module for libraries that know no skips: what jumps over layers travels through every stage between.

stage 0          stage 1              stage 2
x -> (y, up) -> (y, up) -> (z, up) -> (z, up) -> out      up: stashed in stage 0, popped in stage 2
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.error_notes import StageNote
from harness.core.plan import Plan
from harness.nn import dropout, parametrization_cache, skip
from harness.nn.skip import LayerSkip, frozen_prefix, layer_skips, named_layers
from harness.runtime.autograd import differentiable, new_leaf, non_leaf
from harness.runtime.recomputation import Before, ForwardState
from harness.runtime.values import SEVERAL, OverlapWatch, check_value, tensors_of


class StageModule(nn.Sequential):
    """Layers of one stage, under their names in the whole model. It takes and gives a tensor, or a flat tuple of them.

    Between ranks each tensor of a tuple is sent by itself: of one that is there twice, and of two that share memory, a
    change in place reaches one only. Namedtuples arrive as plain tuples.

    Whoever runs it says with `at` which micro-batch comes next: for the dropout masks, and for errors.

    The `prefix`, the first layers of the model, is frozen: what it makes gets no gradient (`ungraded` are such parts
    among all that arrive and leave, "" is what goes from layer to layer).
    """

    def __init__(
        self,
        number: int,
        layers: Sequence[tuple[str, nn.Module]],
        first: int,
        skips: Sequence[LayerSkip],
        prefix: int = 0,
    ) -> None:
        super().__init__(OrderedDict(layers))
        last = first + len(layers) - 1
        self.number = number
        self.arriving = [s.name for s in skips if s.source < first <= s.target]
        self.leaving = [s.name for s in skips if s.source <= last < s.target]
        frozen = {s.name for s in skips if s.source < prefix}
        self.ungraded_in = {*([""] if prefix and first <= prefix else []), *frozen.intersection(self.arriving)}
        self.ungraded_out = {*([""] if last < prefix else []), *frozen.intersection(self.leaving)}
        self.has_backward = last >= prefix
        self.in_place = any(getattr(module, "inplace", False) for module in self.modules())
        self.autocast: torch.dtype | None = None
        self.recomputes = False
        self.key = (0, 0, 0)
        self.again = False
        self._before: dict[tuple[int, int, int], Before] = {}

    def at(self, seed: int, step: int, micro_batch: int, again: bool = False) -> None:
        """Set the (global) micro-batch of the next call; `again`: the call is a recomputation in its backward pass."""
        self.key, self.again = (seed, step, micro_batch), again

    def forward(self, *arrived: Any) -> Any:
        """Run the layers: (input, skips in transit) -> (output, skips in transit)."""
        flat = arrived[0] if len(arrived) == 1 and isinstance(arrived[0], tuple) else arrived
        values = [self._entry(tensor, part) for tensor, part in zip(flat, self._parts(len(flat)), strict=True)]
        own = len(values) - len(self.arriving)
        value = values[0] if own == 1 else tuple(values[:own])
        arriving = dict(zip(self.arriving, values[own:], strict=True))
        with self._around(values[0].device.type) as before, skip.carried(arriving) as left:
            value = self._layers(value)
            if self._draws_masks:
                dropout.remember([*tensors_of(value), *left.values()])
        if missing := [name for name in self.leaving if left.get(name) is None]:
            raise TypeError(f"stage {self.number} stashes None as {missing[0]!r}: between stages go tensors only")
        outs = [value] if isinstance(value, Tensor) else [*value]
        if before is not None:
            before.same_outputs([*outs, *(left[name] for name in self.leaving)])
        skips = [self._exit(left[name], name) for name in self.leaving]
        outs = [*(self._exit(tensor, "") for tensor in outs), *skips]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def leaves(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What arrives, where the stage's own graph begins: leaves, but for what needs no gradient."""
        pairs = zip(tensors, self._parts(len(tensors)), strict=True)
        return tuple(tensor.detach() if part in self.ungraded_in else new_leaf(tensor) for tensor, part in pairs)

    def _parts(self, count: int) -> list[str]:
        """The part of each of `count` tensors that arrive."""
        return [""] * (count - len(self.arriving)) + self.arriving

    def _exit(self, tensor: Tensor, part: str) -> Tensor:
        return (tensor.detach() if part in self.ungraded_out else _differentiable(tensor)).contiguous()

    def _entry(self, tensor: Tensor, part: str) -> Tensor:
        if self.recomputes:
            tensor = tensor.clone()  # what arrived is needed a second time, and any layer may work in place
        # micro-batches are views of a batch: with `data` each counts its own changes in place
        return non_leaf(tensor) if tensor.requires_grad and part not in self.ungraded_in else tensor.data

    def _layers(self, value: Any) -> Any:
        return self._through(named_layers(self), value)

    def _through(self, layers: Sequence[tuple[str, nn.Module]], value: Any) -> Any:
        watch = OverlapWatch(value)
        for name, layer in layers:
            try:
                value = layer(value)
                watch.check(name)
            except BaseException as error:
                where = f"in stage {self.number}, layer {name!r}, micro-batch {self.key[2]}"
                error.add_note(StageNote(where))
                raise
        check_value(value, f"the output of layer {layers[-1][0]!r}" if layers else "the input", SEVERAL)
        return value

    @contextmanager
    def _around(self, kind: str) -> Iterator[Before | None]:
        cast = torch.autocast(kind, self.autocast) if self.autocast else nullcontext()
        parametrization_cache.use(self.modules())
        with cast, self._state_of_layers() as before, dropout.keyed(*self.key), parametrization_cache.own():
            yield before

    @contextmanager
    def _state_of_layers(self) -> Iterator[Before | None]:
        """A recomputation sees what the first run of its micro-batch saw, and leaves the layers as they are."""
        if self.again:
            before = self._before.pop(self.key, None)
            with self._forward_state.recomputation(before):
                yield before
        elif self.recomputes:
            self._before = {key: before for key, before in self._before.items() if key[:2] == self.key[:2]}
            with self._forward_state.first_run() as before:
                self._before[self.key] = before
                yield before
        else:
            yield None

    @cached_property
    def _draws_masks(self) -> bool:
        return dropout.used(self.modules())

    @cached_property
    def _forward_state(self) -> ForwardState:
        layers = named_layers(self)
        return ForwardState((m for _, layer in layers for m in layer.modules()), f"stage {self.number}")


def stage_modules(
    layers: nn.Sequential, plan: Plan, numbers: Sequence[int], portals: bool = False
) -> list[StageModule]:
    """The stages `numbers` of the plan. Layers and parameters are those of `layers`, not copies.

    With `portals` skips go from stage to stage by themselves: none passes through the stages between.
    """
    named = named_layers(layers)
    skips, prefix = layer_skips(named), frozen_prefix(named)
    found = []
    for number in numbers:
        stage = plan.stages[number]
        own = range(stage.first, stage.last + 1)
        passing = [one for one in skips if not portals or one.source in own or one.target in own]
        found.append(StageModule(number, named[stage.first : stage.last + 1], stage.first, passing, prefix))
    return found


def _differentiable(tensor: Tensor) -> Tensor:
    """The libraries send a gradient back for every floating-point tensor: one that needs none becomes a leaf.

    One that has a graph gets a node of its own: libraries cut it off in place, which is not allowed of a view, nor of
    what its layer has saved.
    """
    if tensor.requires_grad:
        return non_leaf(tensor)
    if not differentiable(tensor) or not torch.is_grad_enabled():
        return tensor
    return tensor.detach().requires_grad_()
