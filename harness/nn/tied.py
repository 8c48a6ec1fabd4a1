"""What several layers of a model share: tied weights, and buffers, as the rotary caches of attention.

Tied weights stay equal on several devices, since every copy gets the sum of the gradients. A shared buffer is copied to
each device, too, which is right as long as no forward pass changes it (`SharedBuffers`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from harness.core.model_profile import SharedBuffer, Tied
from harness.core.problem import ProblemError
from harness.core.shared_buffers import not_to_be_copied

T = TypeVar("T", bound=Tensor)
M = TypeVar("M", bound=nn.Module)


def ties(layers: nn.Sequential) -> dict[str, tuple[Tied, ...]]:
    """Maps each layer that shares parameters with other layers to these parameters."""
    found = _shared(layers.named_parameters(remove_duplicate=False))
    return {owner: tuple(Tied(name, tensor_bytes(one)) for name, one in own) for owner, own in found.items()}


def shared_buffers(
    named: Iterable[tuple[str, Tensor]], written: Collection[Tensor]
) -> dict[str, tuple[SharedBuffer, ...]]:
    """Maps each layer that shares buffers with other layers to these; a forward pass changes those that are `written`.

    `named` are the buffers of the whole model by all their names.
    """
    found = _shared(named)
    return {
        owner: tuple(SharedBuffer(name, tensor_bytes(one), one in written) for name, one in own)
        for owner, own in found.items()
    }


def running_statistics(layers: nn.Module) -> set[Tensor]:
    """The buffers of batch norms and the like: what changes them does not count it in their versions."""
    return {buffer for one in layers.modules() if isinstance(one, _NormBase) for buffer in one.buffers()}


class SharedBuffers:
    """The buffers that layers on several devices share; `places` are (name, layer, device) of all layers.

    Raises ProblemError at once where these are running statistics, else after the first step that changes one.
    """

    def __init__(self, places: Iterable[tuple[str, nn.Module, int]]) -> None:
        owners: dict[Tensor, dict[tuple[str, int], None]] = {}
        names: dict[Tensor, str] = {}
        holders: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        statistics: set[Tensor] = set()
        for name, layer, device in places:
            statistics |= running_statistics(layer)
            for path, module, key, buffer in _buffers(layer):
                owners.setdefault(buffer, {})[name, device] = None
                names.setdefault(buffer, f"{name}.{path}")
                holders.setdefault(buffer, []).append((module, key))
        self._compared = False
        self._shared: dict[str, tuple[list[tuple[str, int]], list[tuple[nn.Module, str]]]] = {
            names[buffer]: ([*own], holders[buffer])
            for buffer, own in owners.items()
            if len({device for _, device in own}) > 1
        }
        self._refuse(names[buffer] for buffer in statistics if names[buffer] in self._shared)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around a step. Raises ProblemError if it has changed one of the buffers in place.

        The first step is compared by value, later ones by the versions that torch counts.
        """
        before = [(name, tensor, version(tensor)) for name in self._shared for tensor in self._copies(name)]
        values = [] if self._compared else [tensor.clone() for _, tensor, _ in before]
        yield
        changed = [name for name, tensor, counted in before if version(tensor) != counted]
        changed += [one[0] for one, value in zip(before, values, strict=False) if not torch.equal(one[1], value)]
        self._compared = True
        self._refuse(changed)

    def _copies(self, name: str) -> set[Tensor]:
        """The buffer on each device; one that a layer has replaced by another is its own from then on."""
        _, holders = self._shared[name]
        found = {module._buffers.get(key) for module, key in holders}
        return {tensor for tensor in found if tensor is not None}

    def _refuse(self, changed: Iterable[str]) -> None:
        if problems := [not_to_be_copied(name, self._shared[name][0]) for name in dict.fromkeys(changed)]:
            raise ProblemError(*problems)


def moved(layers: M, to: torch.device | torch.dtype) -> M:
    """Moves a module to a device or dtype; its submodules share buffers as before, where `Module.to` copies each."""
    holders: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for _, module, key, buffer in _buffers(layers):
        holders.setdefault(buffer, []).append((module, key))
    layers.to(to)
    for (first, name), *others in holders.values():
        for module, key in others:
            module._buffers[key] = first._buffers[name]
    return layers


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as torch counts; one made in inference mode is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _buffers(layer: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """All buffers: path, module, key in the module, and the tensor."""
    for prefix, module in layer.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield (f"{prefix}.{key}" if prefix else key), module, key, buffer


def _shared(named: Iterable[tuple[str, T]]) -> dict[str, list[tuple[str, T]]]:
    """Maps each layer that shares tensors with other layers to these, each with its first name in the whole model."""
    names: dict[T, list[str]] = {}
    for name, tensor in named:
        names.setdefault(tensor, []).append(name)
    found: dict[str, list[tuple[str, T]]] = {}
    for tensor, paths in names.items():
        owners = dict.fromkeys(path.partition(".")[0] for path in paths)
        for owner in owners if len(owners) > 1 else ():
            found.setdefault(owner, []).append((paths[0], tensor))
    return found
