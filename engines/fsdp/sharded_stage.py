"""A stage in shards: which layers `fully_shard` gathers together, and what its hooks need around them.

A layer's forward pass                                    hooks that run in this order
    FSDP   gathers the weights, marks what enters          a mark is a view: no layer may change it in place,
    here   `non_leaf`: what enters is the layer's own         so it gets a tensor of its own
    layer
    here   what leaves: a copy where it shows a weight,       an in-place layer after would lose FSDP's next hook;
           `non_leaf` where it is another view                   the memory of weights is freed
    FSDP   frees the weights, hooks onto what leaves
    here   shows the meter what was freed
In a step that is metered, a hook before all of these waits for the end of the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engines.fsdp.layer_groups import groups
from engines.fsdp.traced_collectives import TracedAllGather, TracedReduceScatter, time_waits
from harness.core.problem import CannotRun, Problem, ProblemError
from harness.nn.skip import change_stashed, named_layers, stashed, waiting
from harness.nn.tensor_memory import storage_of
from harness.nn.tied import version
from harness.runtime.autograd import non_leaf
from harness.runtime.collectives import CollectiveCounter
from harness.runtime.stage_module import StageModule

if TYPE_CHECKING:
    from engines.fsdp.engine import Config


class Gathered:
    """The whole weights of all groups. torch keeps their storages and resizes them, 0 bytes when they are freed.

    No operation does that, so the meter notices only when an operation next returns a view.
    """

    def __init__(self) -> None:
        self.metered = False
        self.tensors: list[Tensor] = []
        self.seen: set[nn.Module] = set()
        self.versions: list[tuple[str, Tensor, int]] = []

    def add(self, module: nn.Module) -> None:
        """Add the parameters of a module that has just been gathered; those of other modules are shards again."""
        if module not in self.seen:
            self.seen.add(module)
            whole = {name: p for name, p in module.named_parameters() if not isinstance(p, DTensor)}
            self.tensors += [p.detach() for p in whole.values()]
            kind = type(module).__name__.removeprefix("FSDP")  # as torch renames the class
            self.versions += [(f"{kind}'s {name}", p, version(p)) for name, p in whole.items()]

    def refuse_writes(self) -> None:
        """Raise ProblemError if a pass or a hook has written a weight: that is lost when the weight is freed."""
        if written := [name for name, parameter, before in self.versions if version(parameter) != before]:
            message = f"loses what passes or hooks of the model write to a gathered weight: {', '.join(written)}"
            raise ProblemError(Problem("engine", "fsdp", message, ({"engine": "ddp"},)))

    def watch(self, arrived: Any) -> None:
        """Show what a layer's backward pass will have freed, once the gradient of what arrived there is known."""
        if self.metered:
            for tensor in _flat(arrived):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.show())

    def show(self) -> None:
        """Touch the gathered tensors, so that the memory meter sees which of them have been freed."""
        if self.metered:
            for tensor in self.tensors:
                tensor.detach()


def refuse_hooks(stage: nn.Module) -> None:
    """Raise CannotRun for parameters with hooks (`register_hook`, `register_post_accumulate_grad_hook`): shards take
    their place, which do not have the first, and have the others called with a part of the gradient."""
    hooked = [
        name
        for name, parameter in stage.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        message = f"does not call hooks of parameters as they are, the model has some: {', '.join(hooked)}"
        raise CannotRun([Problem("engine", "fsdp", message, ({"engine": "ddp"},))])


def sharded(
    stage: StageModule,
    mesh: DeviceMesh,
    config: Config,
    policy: MixedPrecisionPolicy,
    counter: CollectiveCounter,
    gathered: Gathered,
) -> FSDPModule:
    """Shard the groups of layers, then what is left: parameters that layers share."""
    group = partial(_group, mesh=mesh, policy=policy, counter=counter, gathered=gathered)
    layers = [layer for _, layer in named_layers(stage)]
    together = [[layers[number] for number in numbers] for numbers in groups(sizes(layers), config)]
    for modules in together:
        group(modules, config.reshard_after_forward)
    if policy.param_dtype:  # torch casts what enters those of groups
        _cast_inputs(set(layers).difference(*together), policy.param_dtype)
    # torch's own default keeps the root's weights where those of other groups are freed, for they are needed at once
    return group([stage], None if config.reshard_after_forward else False)


def sizes(layers: Sequence[nn.Module]) -> list[int]:
    """The layers' own bytes: `engines.fsdp.layer_groups.own_bytes`, of layers that are there."""
    users = Counter(parameter for layer in layers for parameter in layer.parameters())
    own = ([*layer.parameters()] for layer in layers)
    return [0 if any(users[p] > 1 for p in parameters) else sum(p.nbytes for p in parameters) for parameters in own]


def _group(
    modules: list[nn.Module],
    reshard: bool | None,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    counter: CollectiveCounter,
    gathered: Gathered,
) -> FSDPModule:
    for module in modules:
        module.register_forward_hook(_kept_alive)
    group: FSDPModule = fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)[0]
    for module in modules:
        module.register_forward_pre_hook(lambda _, arrived: gathered.watch(arrived), prepend=True)
        module.register_forward_pre_hook(lambda _, arrived: _mapped(non_leaf, arrived))
        module.register_forward_pre_hook(lambda whole, _: gathered.add(whole))
        module.register_forward_hook(lambda _, __, ___: gathered.show())
        _gather_for_skips(module)
    group.set_custom_all_gather(TracedAllGather(counter))  # type: ignore[arg-type]  # as torch's protocol, which is not public
    group.set_custom_reduce_scatter(TracedReduceScatter(counter, gathered.show))  # type: ignore[arg-type]
    for parameters in group._get_fsdp_state()._fsdp_param_groups if mesh.device_type == "cuda" else ():
        time_waits(parameters, counter)
    group.set_force_sum_reduction_for_comms(True)  # a loss is divided by the whole batch already
    group.set_gradient_divide_factor(1.0)
    return group


def _cast_inputs(layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Have those of the layers that have weights, which the root gathers, get floating-point tensors in this dtype."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    for layer in layers:
        if any(True for _ in layer.parameters()):
            layer.register_forward_pre_hook(lambda _, arrived: _mapped(cast, arrived))


def _gather_for_skips(layer: nn.Module) -> None:
    """Gather a layer's weights when the gradient of a skip arrives: it may be earlier than that of the output, which is
    where FSDP has its hook.

    Not of a skip that the layer only passes on: that gradient is known where the tensor was made, after this layer's
    backward pass, and the weights would stay gathered over the optimizer's step, with the values of before.
    """
    entered: list[Tensor] = []

    def enter(*_: Any) -> None:
        entered[:] = waiting()

    def gather(layer: nn.Module, *_: Any) -> None:
        for tensor in stashed(layer):
            if tensor.requires_grad and not any(tensor is one for one in entered):
                tensor.register_hook(lambda _: layer.unshard())  # type: ignore[operator]  # fully_shard makes an FSDPModule of it
        entered.clear()

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(gather)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `change` to a layer's input or output: tensors, or (nested) tuples of them."""
    if isinstance(value, tuple):
        return tuple(_mapped(change, item) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, Tensor):
        yield value


def _kept_alive(layer: nn.Module, _: Any, output: Any) -> Any:
    """What leaves a layer, also as skips: copies of what shows a weight, whose memory is freed next, and no views."""

    def shows_weight(tensor: Tensor) -> bool:
        if tensor._base is None and not isinstance(tensor, nn.Parameter):
            return False
        memory = storage_of(tensor)
        return memory is not None and memory in map(storage_of, layer.parameters())

    def copied(tensor: Tensor) -> Tensor:
        return tensor.clone() if shows_weight(tensor) else tensor

    def no_view(tensor: Tensor) -> Tensor:
        return non_leaf(tensor) if tensor._base is not None else tensor

    change_stashed(layer, copied)
    return _mapped(lambda tensor: no_view(copied(tensor)), output)
