"""Tied weights: parameters that several layers of a model share, and buffers, which layers of one device may share."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from harness.core.model_profile import Tied
from harness.core.problem import Problem, ProblemError


def ties(layers: nn.Sequential) -> dict[str, tuple[Tied, ...]]:
    """Maps each layer that shares parameters with other layers to these parameters."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    tied_of: dict[str, tuple[Tied, ...]] = {}
    for parameter, (first, *more) in names.items():
        owners = dict.fromkeys(name.partition(".")[0] for name in (first, *more))
        if len(owners) > 1:
            tied_of |= {owner: (*tied_of.get(owner, ()), Tied(first, tensor_bytes(parameter))) for owner in owners}
    return tied_of


def refuse_shared_buffers(places: Iterable[tuple[str, nn.Module, int]]) -> None:
    """Raises ProblemError for a buffer that layers (name, layer, device) on two devices share."""
    homes: dict[Tensor, tuple[int, str]] = {}
    for name, layer, device in places:
        for buffer in layer.buffers():
            home, owner = homes.setdefault(buffer, (device, name))
            if home != device:
                layers = f"layers {owner!r} on device {home} and {name!r} on device {device}"
                hint = "a layer of its own, or both on one device"
                raise ProblemError(Problem(layers, None, "share a buffer: its copies cannot be kept equal", hint=hint))


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
