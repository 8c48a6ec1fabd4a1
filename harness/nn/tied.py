"""What several layers of a model share: tied weights, and buffers, as the rotary caches of attention.

Tied weights stay equal on several devices, since every copy gets the sum of the gradients. A shared buffer is copied to
each device, too, which is right as long as no forward pass changes it (`harness.nn.shared_state`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from harness.core.model_profile import Tied
from harness.core.problem import Problem
from harness.nn.tensor_memory import extent, overlapping, storage_of

M = TypeVar("M", bound=nn.Module)


def ties(layers: nn.Sequential) -> dict[str, tuple[Tied, ...]]:
    """Maps each layer that shares parameters with other layers to these parameters."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found: dict[str, list[Tied]] = {}
    for parameter, paths in names.items():
        owners = dict.fromkeys(path.partition(".")[0] for path in paths)
        for owner in owners if len(owners) > 1 else ():
            found.setdefault(owner, []).append(Tied(paths[0], tensor_bytes(parameter), not parameter.requires_grad))
    return {owner: tuple(own) for owner, own in found.items()}


def dtype_in(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in a network of `dtype`: complex numbers have parts of it, whole numbers stay."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def moved(layers: M, to: torch.device | torch.dtype) -> M:
    """Moves a module to a device or dtype; its submodules share buffers, and the memory of buffers of one dtype that
    overlap, as before, where `Module.to` copies each. Conjugated ones it copies, too."""
    holders: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in layers.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                holders.setdefault(buffer, []).append((module, key))
    groups = overlapping(holders)
    if isinstance(to, torch.dtype):
        layers._apply(lambda tensor: tensor.to(dtype_in(tensor, to)))  # `to` makes complex numbers real
    else:
        layers.to(to)
    for (first, name), *others in holders.values():
        for module, key in others:
            module._buffers[key] = first._buffers[name]
    for group in groups:
        now = [first.get_buffer(name) for (first, name), *_ in map(holders.__getitem__, group)]
        plain = len({one.dtype for one in group}) == 1 and not any(one.is_conj() or one.is_neg() for one in group)
        if plain and len(set(map(storage_of, now))) > 1:
            starts, ends = zip(*map(extent, group), strict=True)
            first, size = min(starts), max(ends) - min(starts)
            whole = group[0].as_strided((size,), (1,), first).to(now[0].device, now[0].dtype)
            for one in group:
                for module, key in holders[one]:
                    module._buffers[key] = whole.as_strided(one.shape, one.stride(), one.storage_offset() - first)
    return layers


def move_apart(modules: Sequence[nn.Module], homes: Sequence[int], devices: Mapping[int, torch.device]) -> None:
    """Moves module k to the device with the number `homes[k]`; those of one device share buffers as before."""
    for number in dict.fromkeys(homes):
        here = [module for module, home in zip(modules, homes, strict=True) if home == number]
        moved(nn.ModuleList(here), devices[number])


def renormed(named: Sequence[tuple[str, nn.Module]], homes: Sequence[int], several: bool = False) -> Iterator[Problem]:
    """Yields the embeddings with `max_norm`, whose look-ups scale rows of the weight, if layers of several homes have
    that weight, or `several` processes every layer: copies would differ."""
    holders: dict[nn.Parameter, set[int]] = {}
    for (_, layer), home in zip(named, homes, strict=True):
        for weight in layer.parameters():
            holders.setdefault(weight, set()).add(home)
    for name, layer in named:
        scaling = _with_max_norm(layer)
        if any(several or len(holders[weight]) > 1 for module in scaling for weight in module.parameters()):
            message = "has max_norm, which changes the weight in the forward pass: its copies would differ"
            yield Problem(f"model, its layer {name!r}", None, message, hint="max_norm=None, or no copies of its weight")


def has_max_norm(layer: nn.Module) -> bool:
    """Whether a forward pass of the layer scales rows of an embedding's weight."""
    return bool(_with_max_norm(layer))


def _with_max_norm(layer: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    embeddings = [module for module in layer.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return [module for module in embeddings if module.max_norm is not None]


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as torch counts; one made in inference mode is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
