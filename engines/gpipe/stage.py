"""A stage: consecutive layers on one device, run on one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from engines.gpipe.microbatch import Parts, check_value, mapped, tensors_of
from harness.nn import batchnorm, dropout, skip
from harness.runtime.autograd import on_backward


@dataclass(frozen=True)
class Surroundings:
    """What holds around every task of one pass: the dropout key, and the caller's autocast state."""

    seed: int
    step: int
    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool

    @staticmethod
    def capture(seed: int, step: int, device_type: str) -> Surroundings:
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        return Surroundings(seed, step, device_type, enabled, dtype, torch.is_autocast_cache_enabled())

    @contextmanager
    def entered(self, micro_batch: int) -> Iterator[None]:
        cast = torch.autocast(self.device_type, self.autocast_dtype, self.autocast, self.autocast_cache)
        with cast, dropout.keyed(self.seed, self.step, micro_batch):
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
        self.changes_inputs: bool | None = None
        self._changing: list[batchnorm.Buffer] | None = None

    def run(self, parts: Parts, micro_batch: int, around: Surroundings) -> Parts:
        """Values and skips that arrive -> values and skips that leave."""
        with around.entered(micro_batch), self._noticing_changes():
            return self._layers(parts)

    def run_kept(self, parts: Parts, micro_batch: int, around: Surroundings) -> Parts:
        """`run` for a task that will be recomputed: layers that work in place get copies of what arrives.

        The first run finds out whether there are any.
        """
        if self.changes_inputs is False:
            return self.run(parts, micro_batch, around)
        copies = {part: mapped(Tensor.clone, value) for part, value in parts.items()}
        tensors = [tensor for value in copies.values() for tensor in tensors_of(value)]
        versions = [tensor._version for tensor in tensors]
        outs = self.run(copies, micro_batch, around)
        self.changes_inputs = versions != [tensor._version for tensor in tensors]
        return outs

    def run_again(self, parts: Parts, micro_batch: int, around: Surroundings) -> Parts:
        """The same for a recomputation: running statistics and other buffers stay as the first run left them."""
        changing = [*batchnorm.statistics(self._modules()), *(self._changing or [])]
        with around.entered(micro_batch), batchnorm.throwaway(changing):
            return self._layers(parts)

    def _layers(self, parts: Parts) -> Parts:
        value = parts[""]
        incoming = {name: part for name, part in parts.items() if name and isinstance(part, Tensor)}
        with skip.carried(incoming) as skips:
            for name, layer in self.layers:
                self.layer = name
                value = layer(value)
                if self.marking:
                    on_backward(value, partial(setattr, self, "layer", name))
            leaving = dict(skips)
        check_value(value, f"the output of layer {self.layer!r}")
        return {"": value, **leaving}

    @contextmanager
    def noted(self, phase: str, micro_batch: int) -> Iterator[None]:
        """An error inside says where it happened."""
        try:
            yield
        except BaseException as error:
            where = f"in stage {self.number}, layer {self.layer!r}, micro-batch {micro_batch}, {phase}"
            error.add_note(where)
            raise

    @contextmanager
    def _noticing_changes(self) -> Iterator[None]:
        """In the first training run, find out which buffers the layers change."""
        modules = self._modules() if self._changing is None else []
        if not any(module.training for module in modules):
            yield
            return
        before = [(m, name, b.clone()) for m in modules for name, b in m.named_buffers(recurse=False)]
        yield
        self._changing = [(m, name) for m, name, b in before if not torch.equal(b, m.get_buffer(name))]

    def _modules(self) -> list[nn.Module]:
        return [module for _, layer in self.layers for module in layer.modules()]
