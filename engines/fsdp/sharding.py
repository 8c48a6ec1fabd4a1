"""A stage in shards: which layers `fully_shard` gathers together, and what its hooks need around them.

A layer's forward pass                                    hooks that run in this order
    FSDP   gathers the weights, marks what enters          a mark is a view: no layer may change it in place,
    here   `begun`: what enters is the layer's own         so it gets a tensor of its own
    layer
    here   `begun`: what leaves, where it is a view        an in-place layer behind would lose FSDP's next hook
    FSDP   frees the weights, hooks onto what leaves
    here   shows the meter what was freed
In a step that is metered, a hook before all of these waits for the end of the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from engines.fsdp.collectives import Gather, Scatter, Tally
from engines.fsdp.config import Config
from harness.begin import begun
from harness.skip import named_layers
from harness.stage_module import StageModule

MIB = 2**20


class Gathered:
    """The whole weights of all groups. torch keeps their storages and resizes them, 0 bytes when they are freed.

    No operation does that, so the meter notices only when an operation next returns a view.
    """

    def __init__(self) -> None:
        self.metered = False
        self.tensors: list[Tensor] = []
        self.seen: set[nn.Module] = set()

    def add(self, module: nn.Module) -> None:
        """Those of a module that has just gathered its own; others are in shards now."""
        if module not in self.seen:
            self.seen.add(module)
            self.tensors += [p.detach() for p in module.parameters() if not isinstance(p, DTensor)]

    def watch(self, arrived: Any) -> None:
        """Show what a layer's backward pass will have freed, once the gradient of what arrived there is known."""
        if self.metered:
            for tensor in _flat(arrived):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.show())

    def show(self) -> None:
        """What has been freed by now."""
        if self.metered:
            for tensor in self.tensors:
                tensor.detach()


def sharded(stage: StageModule, mesh: DeviceMesh, config: Config, tally: Tally, gathered: Gathered) -> FSDPModule:
    """Shard groups of layers, then what is left: parameters that layers share."""
    for group in groups(stage, config.group_mb * MIB):
        _group(group, mesh, config.reshard_after_forward, tally, gathered)
    # torch's own default keeps the root's weights where those of other groups are freed, for they are needed at once
    return _group([stage], mesh, None if config.reshard_after_forward else False, tally, gathered)


def groups(stage: StageModule, limit_bytes: float) -> list[list[nn.Module]]:
    """Layers with parameters, none of which another layer has, too: as many neighbours as the limit allows together."""
    layers = [layer for _, layer in named_layers(stage)]
    users = Counter(parameter for layer in layers for parameter in layer.parameters())
    found: list[list[nn.Module]] = []
    room = 0.0
    for layer in layers:
        own = [*layer.parameters()]
        if not own or any(users[parameter] > 1 for parameter in own):
            continue
        size = sum(parameter.nbytes for parameter in own)
        if not found or size > room:
            found.append([])
            room = limit_bytes
        found[-1].append(layer)
        room -= size
    return found


def _group(
    modules: list[nn.Module], mesh: DeviceMesh, reshard: bool | None, tally: Tally, gathered: Gathered
) -> FSDPModule:
    for module in modules:
        module.register_forward_hook(lambda _, __, output: _mapped(_no_view, output))
    group: FSDPModule = fully_shard(modules, mesh=mesh, reshard_after_forward=reshard)[0]
    for module in modules:
        module.register_forward_pre_hook(lambda _, arrived: gathered.watch(arrived), prepend=True)
        module.register_forward_pre_hook(lambda _, arrived: _mapped(begun, arrived))
        module.register_forward_pre_hook(lambda whole, _: gathered.add(whole))
        module.register_forward_hook(lambda _, __, ___: gathered.show())
    group.set_custom_all_gather(Gather(tally))  # type: ignore[arg-type]  # as torch's protocol, which is not public
    group.set_custom_reduce_scatter(Scatter(tally, gathered.show))  # type: ignore[arg-type]
    group.set_force_sum_reduction_for_comms(True)  # a loss is divided by the whole batch already
    group.set_gradient_divide_factor(1.0)
    return group


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """What enters or leaves a layer: tensors, or (nested) tuples of them."""
    if isinstance(value, tuple):
        return tuple(_mapped(change, item) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, Tensor):
        yield value


def _no_view(tensor: Tensor) -> Tensor:
    return begun(tensor) if tensor._base is not None else tensor
