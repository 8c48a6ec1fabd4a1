"""A module whose weights and buffers have shapes and no memory, for a trace; afterwards it is as it was.

Modules on the CPU, on a GPU and on the meta device give the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from harness.capture.python_state import OF_EVERY_MODULE, numbers_changed, plain_attributes
from harness.capture.structure import built, template
from harness.capture.trace import State
from harness.nn.object_state import SCALARS, Snapshot
from harness.nn.tied import dtype_in

CPU = torch.device("cpu")
HOOKS = tuple(name for name in OF_EVERY_MODULE if "_hooks" in name)
"""The tables of a module's hooks."""


@dataclass
class Pretender:
    """Makes fake tensors in one mode. `dtype` is the one of floating-point weights and inputs, None for their own.

    Those in the place of a module's tensors are `kept`, so that no tensor that comes later has the id of one that the
    module replaces (as `torch.nn.utils.weight_norm` does in each pass). `left` are numbers that earlier passes have
    left in attributes, and afterwards those of this one, too.
    """

    mode: FakeTensorMode
    dtype: torch.dtype | None
    kept: list[Tensor] = field(default_factory=list)
    left: dict[tuple[nn.Module, str], float] = field(default_factory=dict)

    def tensor(self, tensor: Tensor, shape: tuple[int, ...] | None = None, cast: bool = True) -> Tensor:
        """One like `tensor`, of another shape if that is given."""
        dtype = dtype_in(tensor, self.dtype) if cast and self.dtype else tensor.dtype
        if shape is None:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
        else:
            meta = torch.empty(shape, dtype=dtype, device="meta")
        return FakeTensor(self.mode, meta, CPU)

    def weight(self, tensor: Tensor) -> Tensor:
        """One like a parameter or a buffer."""
        made = self.tensor(tensor)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


@contextmanager
def pretended(module: nn.Module, pretender: Pretender, training: bool) -> Iterator[dict[int, State]]:
    """Within it the tensors of `module` are fake; yields where each is, by its id."""
    modules = dict(module.named_modules())
    before = [(each, dict(each._parameters), dict(each._buffers), plain_attributes(each)) for each in modules.values()]
    flags = [(each, each.training) for each in modules.values()]
    roots = [(name, value) for *_, plain in before for name, value in plain.items() if not isinstance(value, SCALARS)]
    objects = Snapshot(roots, _itself)
    try:
        places = _replace(modules, pretender)
        for (each, name), number in pretender.left.items():
            vars(each)[name] = number
        begun = [(each, plain_attributes(each)) for each in modules.values()]
        if not training:
            module.eval()
        with same_hooks(modules.values()):
            yield places
        pretender.left = pretender.left | _counted(begun)
    finally:
        objects.put(_itself)
        for each, parameters, buffers, plain in before:
            _restore(each, parameters, buffers, plain)
        for each, flag in flags:
            each.training = flag


@contextmanager
def same_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules have the same hooks afterwards, also where a forward pass registers some for itself: Transformers' first
    one does, in an attribute that it then looks for, and two would collect each output twice."""
    tables = [getattr(module, name) for module in modules for name in HOOKS]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def _replace(modules: dict[str, nn.Module], pretender: Pretender) -> dict[int, State]:
    fakes: dict[int, Tensor] = {}
    places: dict[int, State] = {}

    def fake(tensor: Tensor, path: str, table: str, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = made = make(tensor)
            places[id(made)] = State(path, table, name)
            pretender.kept.append(made)
        return fakes[id(tensor)]

    for path, module in modules.items():
        tables: tuple[tuple[str, dict[str, Any]], ...] = (
            ("_parameters", module._parameters),
            ("_buffers", module._buffers),
        )
        for table, values in tables:
            for name, tensor in values.items():
                if tensor is not None:
                    values[name] = fake(tensor, path, table, name, pretender.weight)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]
        for name, value in plain_attributes(module).items():
            if isinstance(value, Tensor):
                vars(module)[name] = fake(value, path, "__dict__", name, lambda one: pretender.tensor(one, cast=False))
    return places


def _counted(begun: Iterable[tuple[nn.Module, dict[str, Any]]]) -> dict[tuple[nn.Module, str], float]:
    """The numbers that a pass has changed in attributes of modules in which it has changed nothing else: where it keeps
    a table, too, they belong to that."""
    found: dict[tuple[nn.Module, str], float] = {}
    for module, before in begun:
        changed = numbers_changed(before, plain_attributes(module))
        found |= {(module, name): number for name, number in changed.items()}
    return found


def _restore(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any], plain: dict[str, Any]) -> None:
    for table, wanted in ((module._parameters, parameters), (module._buffers, buffers)):
        table.clear()
        table.update(wanted)
    for name in plain_attributes(module).keys() - plain.keys():
        del vars(module)[name]
    vars(module).update(plain)


def run_for_real(
    module: nn.Module, args: Any, kwargs: Any, pretender: Pretender
) -> tuple[Any, dict[tuple[nn.Module, str], Tensor]]:
    """What a module gives for random weights and inputs, as fake tensors, and those that it leaves in attributes: of
    one whose operations depend on values.

    Called within `pretended`, outside of its mode. The largest of these modules must fit into memory.
    """
    generator = torch.Generator().manual_seed(0)

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = torch.zeros(value.shape, dtype=value.dtype)
        return made.normal_(0.0, 0.02, generator=generator) if value.is_floating_point() else made

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = pretender.tensor(value, cast=False)
        return made.requires_grad_() if value.is_floating_point() and grad else made

    grad = torch.is_grad_enabled()
    state = {name: real(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    given = [built(template(values, real), _itself) for values in (args, kwargs)]
    before = {each: plain_attributes(each) for each in module.modules()}
    with torch.no_grad():
        result = torch.func.functional_call(module, state, *given)
    left = {}
    for each, attributes in before.items():
        for name, value in plain_attributes(each).items():
            if isinstance(value, Tensor) and value is not attributes.get(name):
                vars(each)[name] = left[each, name] = fake(value)
    return built(template(result, fake), _itself), left


def _itself(value: Any) -> Any:
    return value
