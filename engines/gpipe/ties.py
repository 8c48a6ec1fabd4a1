r"""Parameters that layers on several devices share: a copy on each device, gradients summed after the backward pass.

    device 0   embedding.weight   gradient g0 --\                /--> g0 + g3
    device 3   head.weight        gradient g3 ---> g0 + g3 ------'--> g0 + g3

The copies begin alike and get the same gradient, so the same optimizer keeps them alike.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from harness.op import Op, Queue
from harness.schedule.ties import Tie


@dataclass
class SharedParameter:
    """`copies[k]` is that of stage `stages[k]`, and of all stages on its device; `names` are all of its names."""

    name: str
    stages: list[int]
    copies: list[nn.Parameter]

    def begin(self) -> None:
        """Before a backward pass: the first copy's gradient, to which this pass adds, stands for all."""
        for parameter in self.copies[1:]:
            parameter.grad = None

    def sum_gradients(self) -> None:
        """After it: every copy gets the sum of all gradients, added up in the order of the stages."""
        there = [parameter.grad for parameter in self.copies if parameter.grad is not None]
        if not there:
            return
        with torch.no_grad():
            total = there[0]
            for gradient in there[1:]:
                total.add_(gradient.to(total.device))
            for parameter in self.copies:
                if parameter.grad is None:
                    parameter.grad = total.to(parameter.device, copy=True)
                elif parameter.grad is not total:
                    parameter.grad.copy_(total)

    def op(self, stage: int, queue: Queue) -> Op:
        """What a trace calls the sum."""
        size = self.copies[0].numel() * self.copies[0].element_size()
        tie = Tie(self.name, tuple(self.stages), size)
        return Op(stage, "collective", None, tie.part, bytes=size, queue=queue)

    @property
    def bytes_sent(self) -> int:
        """The buffers of all members, as for every collective."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.copies)


class Adoption:
    """Hands the layers of a sequence to devices, with copies of what another device has already."""

    def __init__(self, module: nn.Sequential) -> None:
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._homes: dict[nn.Module, int] = {}
        self._copies: dict[nn.Parameter, dict[int, nn.Parameter]] = {}
        self._stages: dict[nn.Parameter, list[int]] = {}

    def layer(self, layer: nn.Module, stage: int, device: int) -> nn.Module:
        """The layer to use on `device` for `stage`. Raises ValueError for buffers that two devices would share."""
        homes = [self._homes.setdefault(m, device) for m in layer.modules() if m._parameters or m._buffers]
        if any(home != device for home in homes):
            if any(True for _ in layer.buffers()):
                raise ValueError(
                    f"stage {stage} on device {device} has a {type(layer).__name__} that stands on another device, "
                    "too: its buffers cannot be kept alike -> a layer of its own, or both stages on one device"
                )
            layer = copy.deepcopy(layer, {id(parameter): parameter for parameter in layer.parameters()})
        for module in layer.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = self._on(device, stage, parameter)
        return layer

    def _on(self, device: int, stage: int, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter itself on the first device that needs it, on each other one a copy."""
        copies = self._copies.setdefault(parameter, {})
        if device not in copies:
            first = not copies
            copies[device] = parameter if first else nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            self._stages.setdefault(parameter, []).append(stage)
        return copies[device]

    def shared(self) -> list[SharedParameter]:
        """The parameters of which there are copies, in the order of the layers."""
        return [
            SharedParameter(self._names[parameter], self._stages[parameter], list(copies.values()))
            for parameter, copies in self._copies.items()
            if len(copies) > 1
        ]


def second_names(module: nn.Module, shared: Sequence[SharedParameter]) -> dict[str, str]:
    """The names of all copies but the first, each with the name of the first: the one that the whole model knows."""
    owners = {parameter: one.name for one in shared for parameter in one.copies[1:]}
    return {name: owners[p] for name, p in module.named_parameters() if p in owners}
