"""Tied weights: parameters that several layers of a model share."""

from __future__ import annotations

from torch import Tensor, nn

from harness.core.model_profile import Tied


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


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
