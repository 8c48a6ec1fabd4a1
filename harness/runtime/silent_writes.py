"""Changes of parameters that torch does not count: by `.data`, or by NumPy views of their memory.

A few elements of every parameter are compared before and after a run, those of one device and dtype together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.runtime import output_check

IMAGES = 4
"""Dimensions of the weights of a convolution of images."""
ELEMENTS = 16
"""Elements of each parameter."""


@dataclass(frozen=True)
class _View:
    parameter: Tensor
    memory: int
    elements: Tensor


class SilentWrites:
    """Compares elements of parameters; their views are kept from run to run."""

    def __init__(self) -> None:
        self._views: dict[int, _View] = {}

    def before(self, parameters: Iterable[Tensor]) -> Callable[[], Tensor | None]:
        """Take the elements now. What is returned, called after the run, gives one of these parameters that has
        changed; of those on a GPU `output_check.raise_differences` says later that there is one."""
        groups: dict[tuple[torch.device, torch.dtype], list[_View]] = {}
        for parameter in parameters:
            if type(parameter) in (Tensor, nn.Parameter) and not parameter.is_meta and parameter.numel():
                groups.setdefault((parameter.device, parameter.dtype), []).append(self._view(parameter))
        then = [torch.cat([view.elements for view in views]) for views in groups.values()]

        def changed() -> Tensor | None:
            for was, views in zip(then, groups.values(), strict=True):
                moved = [view.parameter for view in views if view.parameter.data_ptr() != view.memory]
                if moved:
                    return moved[0]
                now = torch.cat([view.elements for view in views])
                if was.device.type != "cpu":
                    output_check.later((~((was == now) | (was != was))).any(), output_check.WRITTEN)
                elif not torch.equal(was, now):
                    return next(
                        (
                            view.parameter
                            for view, one in zip(views, _cut(was, views), strict=True)
                            if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(view.elements))
                        ),
                        None,
                    )
            return None

        return changed

    def _view(self, parameter: Tensor) -> _View:
        known, memory = self._views.get(id(parameter)), parameter.data_ptr()
        if known is None or known.parameter is not parameter or known.memory != memory:
            flat = parameter.detach()
            if flat.dim() == IMAGES and flat.is_contiguous(memory_format=torch.channels_last):
                flat = flat.permute(0, 2, 3, 1)
            flat = (
                flat.reshape(-1) if flat.is_contiguous() else flat.as_strided((min(flat.shape),), (sum(flat.stride()),))
            )
            elements = flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]
            known = self._views[id(parameter)] = _View(parameter, memory, elements)
        return known


def _cut(elements: Tensor, views: list[_View]) -> tuple[Tensor, ...]:
    return elements.split([view.elements.numel() for view in views])
