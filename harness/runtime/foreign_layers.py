"""What a process may not use: weights and layers of other stages, which torch does not know to be parts of its own.

    stage 0   layer 0   weight                            trained there
    stage 1   layer 4   self.head = [layer 0], or a closure, or a global name: a copy in another process

Nobody sums the gradients of such a copy, nor carries its buffers over, so its use is refused after the step that did
it. Weights that show the same memory, as those of `a.weight.data = b.weight.data`, are refused where they become two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from harness.core.plan import Plan
from harness.core.problem import Problem, ProblemError
from harness.nn.skip import named_layers
from harness.nn.tensor_memory import meet, overlap, storage_of
from harness.nn.tied import renormed

HIDDEN = "an attribute of the layer itself that is this parameter or module, or both layers in one stage"
MEMORY = "one parameter in both places, or clone() for one of them"
WEIGHT = "the weight {!r}, which is none of its parameters: its gradients would be lost"
MODULE = "the module {!r}, which is none of its layers: it would train a copy, and change the buffers of a copy"


class ForeignLayers:
    """The weights and modules of a model, as they are before an engine takes or changes some of them."""

    def __init__(self, layers: nn.Sequential, plan: Plan) -> None:
        self.layers, self.plan = layers, plan
        self.weights = {one: name for name, one in layers.named_parameters() if one.requires_grad}
        self.modules = {one: name for name, one in layers.named_modules() if name}
        self.same_memory = list(same_memory(layers))
        self.used: dict[str, None] = {}
        self.stages = ""

    def watch(self, stages: Iterable[int]) -> None:
        """From now on this process has these stages alone. Raises ProblemError if tensors of one memory have become
        two, and for weights of several processes that a forward pass changes."""
        several = self.plan.mesh.data * self.plan.mesh.tensor > 1
        refuse([*self._separated(), *renormed(named_layers(self.layers), self._stages(), several)])
        numbers = list(stages)
        self.stages = f"stage {', '.join(map(str, numbers))}"
        own = nn.ModuleList(layer for number in numbers for layer in self._stage(number))
        here = set(own.modules())
        for parameter in own.parameters():
            self.weights.pop(parameter, None)
        for module, name in self.modules.items():
            if module not in here:
                module.register_forward_pre_hook(_noting(name, self.used))

    def refuse(self) -> None:
        """After a step: raises ProblemError for what it has used."""
        trained = [name for weight, name in self.weights.items() if weight.grad is not None]
        found = [WEIGHT.format(name) for name in trained] or [MODULE.format(name) for name in self.used]
        refuse(Problem(self.stages, None, f"uses {what}", hint=HIDDEN) for what in found)

    def _separated(self) -> Iterator[Problem]:
        now = dict(_tensors(self.layers))
        for one, other in self.same_memory:
            if self._stage_of(one) != self._stage_of(other) or not overlap(_local(now[one]), _local(now[other])):
                message = f"shows the memory of {other!r}, too, which this engine keeps apart"
                yield Problem(f"model, its weight {one!r}", None, message, hint=MEMORY)

    def _stages(self) -> list[int]:
        return [number for number, stage in enumerate(self.plan.stages) for _ in range(stage.layers)]

    def _stage(self, number: int) -> list[nn.Module]:
        stage = self.plan.stages[number]
        return [layer for _, layer in named_layers(self.layers)[stage.first : stage.last + 1]]

    def _stage_of(self, name: str) -> int:
        layers = [layer for layer, _ in named_layers(self.layers)]
        return self.plan.stage_of(layers.index(name.partition(".")[0]))


def _noting(name: str, used: dict[str, None]) -> Callable[[nn.Module, tuple[object, ...]], None]:
    def note(_: nn.Module, given: tuple[object, ...]) -> None:
        if not any(isinstance(one, FakeTensor) for one in given):  # shapes alone, of the whole model
            used[name] = None

    return note


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ProblemError if there are any."""
    if found := list(problems):
        raise ProblemError(*found)


def _tensors(layers: nn.Sequential) -> Iterator[tuple[str, Tensor]]:
    yield from layers.named_parameters()
    yield from layers.named_buffers()


def same_memory(layers: nn.Sequential) -> Iterator[tuple[str, str]]:
    """The names of a trained weight and of another tensor, for all that have memory in common."""
    holders: dict[object, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(layers):
        if (storage := storage_of(tensor)) is not None:
            holders.setdefault(storage, []).append((name, tensor))
    for tensors in holders.values():
        for (one, first), (other, second) in combinations(tensors, 2):
            if first.requires_grad and meet(first, second):
                yield one, other


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
