r"""Parameters that layers on several devices share: a copy on each device, gradients summed after the backward pass.

    device 0   embedding.weight   gradient g0 --\                /--> g0 + g3
    device 3   head.weight        gradient g3 ---> g0 + g3 ------'--> g0 + g3

The copies begin equal and get the same gradient, so the same optimizer keeps them equal.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from harness.core.op import Op, Queue
from harness.core.problem import Problem, ProblemError
from harness.schedule.dependency_graph import TIED
from harness.schedule.tied_weight_ops import Tie

SUMS = f"all_reduce@{TIED}"
"""Name under which the bytes of the gradient sums of tied weights are counted."""


@dataclass
class SharedParameter:
    """`places[k]` is where stage `stages[k]`, and with it every stage on its device, has its copy: (module, key)."""

    name: str
    stages: list[int]
    places: list[tuple[nn.Module, str]]

    @property
    def copies(self) -> list[nn.Parameter]:
        """The copies as they are now; a state dict may have been assigned to them."""
        return [module._parameters[key] for module, key in self.places]  # type: ignore[misc]

    def begin(self) -> None:
        """Before a backward pass: the first copy's gradient, to which this pass adds, stands for all.

        Raises ProblemError if only some copies are frozen: they would not stay equal.
        """
        first, *others = self.copies
        if any(parameter.requires_grad != first.requires_grad for parameter in others):
            message = f"has a copy on {len(self.places)} devices, and only some of them require gradients"
            raise ProblemError(Problem(self.name, None, message, hint="requires_grad_ for all of them"))
        for parameter in others:
            parameter.grad = None

    def sum_gradients(self) -> int:
        """After it: every copy gets the sum of all gradients, added up in the order of the stages.

        The bytes that were summed: the buffers of all members, as for every collective.
        """
        copies = self.copies
        there = [parameter.grad for parameter in copies if parameter.grad is not None]
        if not there:
            return 0
        with torch.no_grad():
            total = there[0]
            for gradient in there[1:]:
                total.add_(gradient.to(total.device, non_blocking=True))
            for parameter in copies:
                if parameter.grad is None:
                    parameter.grad = total.to(parameter.device, copy=True, non_blocking=True)
                elif parameter.grad is not total:
                    parameter.grad.copy_(total)
        return len(copies) * total.numel() * total.element_size()

    def copy_last(self) -> None:
        """Copy the last copy into all others: if several values are loaded for one weight, the last one counts."""
        *others, last = self.copies
        with torch.no_grad():
            for parameter in others:
                parameter.copy_(last)

    def op(self, stage: int, queue: Queue) -> Op:
        """Return the op of the gradient sum in a trace."""
        first = self.copies[0]
        tie = Tie(self.name, tuple(self.stages), first.numel() * first.element_size())
        return Op(stage, "collective", None, tie.part, bytes=tie.bytes, queue=queue)


@dataclass
class TiedCopies:
    """All shared parameters of a pipeline; `pending` while a backward pass over CUDA devices will sum them."""

    shared: list[SharedParameter]
    pending: bool = False


class LayerAdoption:
    """Hands the layers of a sequence to devices. The sequence itself stays as it is: what needs a copy of a parameter
    that is on another device becomes part of a copied layer."""

    def __init__(self, module: nn.Sequential) -> None:
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._places: dict[nn.Parameter, dict[int, tuple[nn.Module, str]]] = {}
        self._stages: dict[nn.Parameter, list[int]] = {}

    def layer(self, layer: nn.Module, stage: int, device: int) -> nn.Module:
        """The layer to use on `device` for `stage`."""
        elsewhere = [p for p in layer.parameters() if p in self._places and device not in self._places[p]]
        if elsewhere or any(self._copied(p, device) for p in layer.parameters()):
            layer = copy.deepcopy(layer, {id(one): one for one in (*layer.parameters(), *layer.buffers())})
        for module in layer.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._put(module, key, parameter, stage, device)
        return layer

    def _copied(self, parameter: nn.Parameter, device: int) -> bool:
        """Whether the device has a copy of the parameter, not itself."""
        module, key = self._places.get(parameter, {}).get(device, (None, ""))
        return module is not None and module._parameters[key] is not parameter

    def _put(self, module: nn.Module, key: str, parameter: nn.Parameter, stage: int, device: int) -> None:
        """The parameter itself on the first device that needs it, on each other one a copy."""
        places = self._places.setdefault(parameter, {})
        if device not in places:
            if places:
                module._parameters[key] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            places[device] = (module, key)
            self._stages.setdefault(parameter, []).append(stage)
        else:
            owner, name = places[device]
            module._parameters[key] = owner._parameters[name]

    def shared(self) -> list[SharedParameter]:
        """The parameters of which there are copies, in the order of the layers."""
        return [
            SharedParameter(self._names[parameter], self._stages[parameter], list(places.values()))
            for parameter, places in self._places.items()
            if len(places) > 1
        ]


def second_names(module: nn.Module, shared: Sequence[SharedParameter]) -> dict[str, str]:
    """The names of all copies but the first, each with the name of the first: the one that the whole model knows."""
    owners = {parameter: one.name for one in shared for parameter in one.copies[1:]}
    return {name: owners[p] for name, p in module.named_parameters() if p in owners}
