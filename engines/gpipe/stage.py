"""A stage: consecutive layers on one device, run on one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from engines.gpipe.microbatch import Parts, all_tensors
from harness.core.error_notes import StageNote
from harness.nn import dropout, parametrization_cache, skip
from harness.runtime.autograd import on_backward
from harness.runtime.recomputation import Before, ForwardState
from harness.runtime.values import OverlapWatch, check_value, mapped, mark_overlaps, tensors_of


@dataclass(frozen=True)
class Surroundings:
    """State around every task of one pass: the dropout key, the caller's autocast state and saved-tensor hooks."""

    seed: int
    step: int
    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool
    saved_tensor_hooks: tuple[Any, Any] | None

    @staticmethod
    def capture(seed: int, step: int, device_type: str) -> Surroundings:
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return Surroundings(seed, step, device_type, enabled, dtype, torch.is_autocast_cache_enabled(), hooks)

    @contextmanager
    def entered(self, micro_batch: int) -> Iterator[None]:
        cast = torch.autocast(self.device_type, self.autocast_dtype, self.autocast, self.autocast_cache)
        hooks = saved_tensors_hooks(*self.saved_tensor_hooks) if self.saved_tensor_hooks else nullcontext()
        with cast, hooks, dropout.keyed(self.seed, self.step, micro_batch), parametrization_cache.own():
            yield


class Stage:
    """Layers of one stage. `layer` is the name of the layer at work, for messages (one thread runs a stage).

    With `marking` the backward pass says its layer, too. That takes a Python call for each layer, in threads that
    otherwise need no interpreter: 3 to 5 % of a step on two CPU devices.
    """

    def __init__(self, number: int, layers: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
        self.number = number
        self.layers = list(layers)
        self.device = device
        self.layer = ""
        self.marking = False
        skippable = [m for _, layer in self.layers for m in layer.modules() if isinstance(m, skip.Skippable)]
        self.pops = {module.key(name) for module in skippable for name in module.pops}
        self.stashes = {module.key(name) for module in skippable for name in module.stashes}
        self.draws_masks = dropout.used(m for _, layer in self.layers for m in layer.modules())
        self.state = ForwardState((m for _, layer in self.layers for m in layer.modules()), f"stage {number}")

    def run(self, parts: Parts, micro_batch: int, around: Surroundings) -> Parts:
        """Values and skips that arrive -> values and skips that leave."""
        with around.entered(micro_batch):
            outs = self._layers(parts)
            if self.draws_masks:
                dropout.remember(all_tensors(outs))
            return outs

    def run_kept(self, parts: Parts, micro_batch: int, around: Surroundings) -> tuple[Parts, Before]:
        """`run` for a task that will be recomputed, and what the layers' state was.

        The layers get copies of what arrives, since any of them may work in place, for some micro-batches only.
        """
        copies = {part: mapped(Tensor.clone, value) for part, value in parts.items()}
        with self.state.first_run() as before:
            outs = self.run(copies, micro_batch, around)
        before.same_outputs(all_tensors(outs))
        return outs, before

    def run_again(self, parts: Parts, micro_batch: int, around: Surroundings, before: Before | None) -> Parts:
        """Recompute a task: running statistics and other buffers stay as the first run left them.

        Raises RuntimeError if its outputs are not those of the first run.
        """
        with self.state.recomputation(before):
            outs = self.run(parts, micro_batch, around)
        if before is not None:
            before.same_outputs(all_tensors(outs))
        return outs

    def _layers(self, parts: Parts) -> Parts:
        value = parts[""]
        entered, watch = tensors_of(value), OverlapWatch(value)
        incoming = {name: part for name, part in parts.items() if name}
        with skip.carried(incoming) as skips:
            for name, layer in self.layers:
                self.layer = name
                value = layer(value)
                watch.check(name)
                if self.marking:
                    on_backward(value, partial(setattr, self, "layer", name))
            leaving = dict(skips)
        check_value(value, f"the output of layer {self.layer!r}")
        mark_overlaps(value, entered)
        if wrong := leaving.keys() ^ ((incoming.keys() | self.stashes) - self.pops):
            names = ", ".join(map(repr, sorted(wrong)))
            raise LookupError(f"stage {self.number} declares to stash or pop {names}, and its layers have not done so")
        return {"": value, **leaving}

    @contextmanager
    def annotating_errors(self, phase: str, micro_batch: int) -> Iterator[None]:
        """Add a note to an error inside: its stage, layer, micro-batch and phase."""
        try:
            yield
        except BaseException as error:
            where = f"in stage {self.number}, layer {self.layer!r}, micro-batch {micro_batch}, {phase}"
            error.add_note(StageNote(where))
            raise
