"""What the layers of a chain do that some engines cannot run (`harness.core.traits`), seen in one forward pass.

Seen      watches the kernels of the pass: whose weights they use, what they change in place
traits    adds what follows from modules, from outputs, and from the graph of autograd
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from harness.capture.python_state import generators
from harness.core.traits import Given, Traits
from harness.measure.layer_chain import Chain, Task, tensors
from harness.nn import dropout
from harness.nn.skip import named_layers
from harness.nn.tied import has_max_norm
from harness.runtime.autograd import differentiable
from harness.runtime.recomputation import ForwardState

REENTRANT = "CheckpointFunctionBackward"
"""The node of a checkpoint with use_reentrant=True."""


class Seen:
    """The memory that each layer's kernels use and change, the weights that get other memory (`weight.data = ...`), and
    the modules that it calls."""

    def __init__(self, chain: Chain) -> None:
        self.layers = [layer for _, layer in named_layers(chain.layers)]
        self.names: dict[int, str] = {}
        for name, weight in chain.layers.named_parameters():
            self.names.setdefault(_memory(weight), name)
        self.own = [{_memory(weight) for weight in layer.parameters()} for layer in self.layers]
        self.uses: list[dict[str, None]] = [{} for _ in self.layers]
        self.changes: list[set[int]] = [set() for _ in self.layers]
        self.draws = [False for _ in self.layers]
        self.whole_draws = [False for _ in self.layers]
        self.moved: list[list[str]] = [[] for _ in self.layers]
        self._weights = dict(chain.layers.named_parameters())
        self._modules = [set(layer.modules()) for layer in self.layers]
        self._running: int | None = None
        self._samples = len(chain.batch)
        self._dropped: set[nn.Module] = set()
        self._dropping = False

    def foreign(self, index: int, task: Task) -> tuple[str, ...]:
        """The modules that a layer uses and does not hold, and the weights of others that do not arrive as values."""
        arrived = {_memory(tensor) for tensor in (*tensors(task.entry), *task.popped.values())}
        arriving = {name for memory, name in self.names.items() if memory in arrived}
        names = [name for name in self.uses[index] if name not in arriving]
        return tuple(name for name in names if not any(name.startswith(f"{module}.") for module in names))

    @contextmanager
    def modules(self, chain: Chain) -> Iterator[None]:
        """Around the pass: sees calls of modules that a layer does not hold."""
        named = [(name, module) for name, module in chain.layers.named_modules() if name]
        hooks = [module.register_forward_pre_hook(partial(self._call, name)) for name, module in named]
        for module in chain.layers.modules():
            if dropout.has_mask(module):
                hooks += [module.register_forward_pre_hook(self._drop), module.register_forward_hook(self._drop_ended)]
        yield
        for hook in hooks:
            hook.remove()

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Around the forward pass of a layer."""
        self._running, before = index, generators()
        places = {name: _memory(weight) for name, weight in self._weights.items()}
        yield
        self._running, self.draws[index] = None, generators() != before
        self.moved[index] = [name for name, place in places.items() if _memory(self._weights[name]) != place]

    def kernel(self, func: Any, args: tuple[Any, ...], inputs: Sequence[Tensor]) -> None:
        """A kernel of the layer that runs."""
        index = self._running
        if index is None:
            return
        self.whole_draws[index] |= torch.Tag.nondeterministic_seeded in func.tags and not self._dropping
        for tensor in inputs:
            memory = _memory(tensor)
            if memory in self.names and memory not in self.own[index]:
                self.uses[index][self.names[memory]] = None
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info and argument.alias_info.is_write:
                    self.changes[index].update(map(_memory, _strided(value)))

    def _call(self, name: str, module: nn.Module, _: Any) -> None:
        index = self._running
        if index is not None and module not in self._modules[index]:
            self.uses[index][name] = None

    def _drop(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """A dropout module begins; those of this project draw the mask of the key, whatever draws before them."""
        first = bool(given) and isinstance(given[0], Tensor) and given[0].shape[:1] == (self._samples,)
        self._dropping = isinstance(module, dropout.Dropout) or (first and module not in self._dropped)
        self._dropped.add(module)

    def _drop_ended(self, *_: Any) -> None:
        self._dropping = False


def traits(chain: Chain, tasks: Sequence[Task], seen: Seen) -> list[Traits]:
    """The traits of each layer."""
    every: dict[Tensor, str] = {w: name for name, w in chain.layers.named_parameters()}
    names = {w: name for w, name in every.items() if w.requires_grad}
    with_gradient = trained(chain, tasks)
    found = []
    for index, (layer, task) in enumerate(zip(seen.layers, tasks, strict=True)):
        own: dict[Tensor, str] = {w: names[w] for w in layer.parameters() if w in names}
        held = [(name, weight) for weight in layer.parameters() if (name := every.get(weight))]
        changed = seen.changes[index]
        found.append(
            Traits(
                gives=tuple(map(given, tensors(task.output))),
                uses=seen.foreign(index, task),
                changes=(*(name for memory, name in seen.names.items() if memory in changed), *seen.moved[index]),
                in_place=_source(chain, tasks, index, changed),
                max_norm=has_max_norm(layer),
                sparse=tuple(own[weight] for weight in _sparse(layer) if weight in own),
                scalars=tuple(name for weight, name in own.items() if not weight.dim()),
                empty=tuple(name for weight, name in own.items() if not weight.numel() and weight in with_gradient),
                draws=seen.draws[index],
                whole_draws=seen.whole_draws[index],
                too_large=ForwardState([*layer.modules()], "").too_large(),
                unused=tuple(name for weight, name in own.items() if weight not in with_gradient),
                complex=tuple(name for name, weight in held if weight.is_complex()),
                integers=tuple(name for name, weight in held if not differentiable(weight)),
                strided=tuple(name for name, weight in held if not weight.is_contiguous()),
            )
        )
    return found


def given(tensor: Tensor) -> Given:
    """What a layer hands over, as engines see it."""
    return Given(str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


def _source(chain: Chain, tasks: Sequence[Task], index: int, changed: set[int]) -> int | None:
    """The first layer after which two tensors are alive that share memory, if layer `index` changes one of them."""
    entered = [*tensors(tasks[index].entry), *tasks[index].popped.values()]
    several = _twice(entered) & changed
    for number, task in enumerate(tasks[:index]) if several else ():
        jumping = [tasks[s.source].stashed[s.name] for s in chain.skips if s.source <= number < s.target]
        if several & _twice([*tensors(task.output), *jumping]):
            return number
    return None


def _twice(alive: Sequence[Tensor]) -> set[int]:
    """The memory that several tensors show."""
    memories = [_memory(tensor) for tensor in {id(tensor): tensor for tensor in alive}.values()]
    return {memory for memory in memories if memories.count(memory) > 1}


def trained(chain: Chain, tasks: Sequence[Task]) -> set[Tensor]:
    """The weights that get a gradient, found in the graphs of autograd, from the loss on.

    A checkpoint with use_reentrant=True shows its graph in its backward pass alone: all weights of its layer count.
    """
    found: set[Tensor] = set()
    needed = _needed(chain, tasks[-1])
    skips: set[str] = set()
    for (_, layer), task in reversed(list(zip(named_layers(chain.layers), tasks, strict=True))):
        roots = [tensor for tensor, wanted in zip(tensors(task.output), needed, strict=True) if wanted]
        roots += [tensor for name, tensor in task.stashed.items() if name in skips]
        reached = _leaves(roots, layer.parameters())
        found |= reached
        skips |= {name for name, tensor in task.popped.items() if tensor in reached}
        needed = [tensor in reached for tensor in tensors(task.entry)]
    return found


def _needed(chain: Chain, last: Task) -> list[bool]:
    """Which outputs the loss depends on; all, if it cannot be computed without values."""
    outputs = [tensor.detach().requires_grad_(differentiable(tensor)) for tensor in tensors(last.output)]
    given: Any = outputs[0] if isinstance(last.output, Tensor) else tuple(outputs)
    with suppress(DataDependentOutputException, DynamicOutputShapeException), torch.enable_grad():
        reached = _leaves([chain.model.loss(given, chain.batch.targets)])
        return [tensor in reached for tensor in outputs]
    return [True for _ in outputs]


def _leaves(roots: Sequence[Tensor], held: Iterable[Tensor] = ()) -> set[Tensor]:
    """The tensors that get a gradient from the backward pass of `roots`, all those `held` if it runs another one."""
    found = {tensor for tensor in roots if tensor.requires_grad and tensor.grad_fn is None}
    nodes: list[Any] = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    known = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name() == REENTRANT:
            found.update(held)
        if hasattr(node, "variable"):
            found.add(node.variable)
        new = {after for after, _ in node.next_functions if after is not None} - known
        known |= new
        nodes += new
    return found


def _sparse(layer: nn.Module) -> Iterator[Tensor]:
    for module in layer.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield module.weight


def _strided(value: Any) -> list[Tensor]:
    found = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in found if isinstance(one, Tensor) and one.layout is torch.strided]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
