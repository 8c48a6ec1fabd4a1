"""Whether a chain computes what its module computes: outputs, gradients and buffers, in float64.

the example          two passes, the second of other values and weights, so that what one leaves to the next counts
its first sample     one pass, since nothing may depend on the number of samples
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.capture.layers import Whole, names
from harness.capture.pretend import same_hooks
from harness.capture.python_state import plain_attributes
from harness.capture.recorder import is_input, samples
from harness.capture.split import AS_IT_IS, Select, inputs
from harness.capture.structure import built, template, tensors
from harness.core.problem import Problem, ProblemError
from harness.nn.object_state import SCALARS, Snapshot
from harness.nn.skip import carried, named_layers
from harness.nn.tied import dtype_in

TOLERANCE = 1e-9
"""By which numbers may differ, as a part of the largest one of their tensor: sums in another order."""
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True)
class _Call:
    """A call of a submodule, in which layer, and a number each for what it was given and what it gave."""

    module: nn.Module
    layer: str
    taken: float
    given: float


@dataclass
class _Pass:
    """Outputs, gradients and buffers by names of the module, and the calls of submodules."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    calls: list[_Call] = field(default_factory=list)


def verify(
    module: nn.Module,
    chain: nn.Sequential,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    select: Select | None = None,
) -> None:
    """Compares `chain` with the `module` it was split from. Weights must have values; all stay as they are.

    `args`, `kwargs` and `select` are those of `split`. Raises ProblemError that names the layer which differs.
    """
    values = (args, kwargs or {})
    count = samples(values)
    for number, passes in ((count, 2), (1, 1)) if count > 1 else ((1, 2),):
        given = [_part(values, count, number, index) for index in range(passes)]
        taken = [_part(inputs(*values), count, number, index) for index in range(passes)]
        try:
            expected = _run(module, chain, [partial(_called, module, one, select) for one in given], in_chain=False)
        except FAILURES:
            if number == count:
                raise
            continue  # as batch norm does, for a single value
        found = _run(module, chain, [partial(chain, one) for one in taken], in_chain=True)
        for one, other in zip(expected, found, strict=True):
            _compare(module, chain, one, other, number)


def _part(values: Any, count: int, number: int, index: int) -> Any:
    """The example's first samples, in float64; in the second pass smaller, and whole numbers from right to left."""

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if is_input(value, count):
            value = value[:number]
            if index and (value.is_floating_point() or value.is_complex()):
                value = value * 0.75
            elif index:
                value = value.flip(tuple(range(1, value.dim())))
        return value.to(dtype_in(value, torch.float64))

    return built(template(values, part), lambda leaf: leaf)


def _called(module: nn.Module, given: Any, select: Select | None) -> Any:
    result = module(*given[0], **given[1])
    return select(result) if select else result


def _run(module: nn.Module, chain: nn.Sequential, passes: Sequence[Callable[[], Any]], in_chain: bool) -> list[_Pass]:
    """Passes one after the other, from the state that module and chain have now."""
    found = []
    watch = _Watch(module, chain)
    with _in_float64(nn.ModuleList([module, chain])), watch.watching(), torch.random.fork_rng(devices=[]), carried({}):
        torch.manual_seed(0)
        for number, run in enumerate(passes):
            module.zero_grad()
            if number:
                _update(module)
            watch.calls = []
            try:
                outputs = tensors(run())
            except FAILURES as error:
                if not in_chain:
                    raise
                problem = _problem(module, f"layer {watch.layer!r} fails: {str(error).partition(chr(10))[0]}")
                raise ProblemError(problem) from error
            _loss(outputs).backward()
            holder = chain if in_chain else module
            known = names(chain)
            buffers = {
                known.get(name, name) if in_chain else name: buffer.clone()
                for name, buffer in holder.named_buffers(remove_duplicate=False)
            }
            gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            found.append(_Pass([tensor.detach() for tensor in outputs], gradients, buffers, watch.calls))
        module.zero_grad()
    return found


def _update(module: nn.Module) -> None:
    """Change trained weights as a step of training does."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.requires_grad:
                weight.mul_(0.9)


def _loss(outputs: list[Tensor]) -> Tensor:
    """A sum in which every number of the outputs has a weight of its own."""
    loss = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for tensor in outputs:
        if tensor.requires_grad:
            loss = loss + (tensor * _weights(tensor)).sum()
    return loss


def _weights(tensor: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64, device=tensor.device).view(tensor.shape)


def _compare(module: nn.Module, chain: nn.Sequential, one: _Pass, other: _Pass, number: int) -> None:
    """Raises ProblemError for what differs."""
    of = f"of {number} sample{'s' * (number != 1)}"
    if len(one.outputs) != len(other.outputs) or any(map(_differs, one.outputs, other.outputs)):
        raise ProblemError(_problem(module, f"layer {_first_other(chain, one, other)!r} gives other values {of}"))
    homes = {name: layer.partition(".")[0] for layer, name in names(chain).items()}
    for what, mine, theirs in (
        ("gradient", one.gradients, other.gradients),
        ("buffer", one.buffers, other.buffers),
    ):
        for name, tensor in mine.items():
            if name not in theirs or _differs(tensor, theirs[name]):
                raise ProblemError(_problem(module, f"layer {homes.get(name, '')!r} gives {name} another {what} {of}"))


def _first_other(chain: nn.Sequential, one: _Pass, other: _Pass) -> str:
    """The layer in which a submodule first gives something else, the one before if it was given something else; the
    last layer if all give the same."""
    before = ""
    for mine, theirs in zip(one.calls, other.calls, strict=False):
        if mine.module is not theirs.module or _far(mine.taken, theirs.taken):
            return before or theirs.layer
        if _far(mine.given, theirs.given):
            return theirs.layer
        before = theirs.layer
    return named_layers(chain)[-1][0]


def _far(one: float, other: float) -> bool:
    return abs(one - other) > 1e-6 * max(abs(one), abs(other))


def _differs(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    scale = float(one.abs().nan_to_num(posinf=0.0).max()) if one.numel() else 0.0
    return not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


def _problem(module: nn.Module, message: str) -> Problem:
    return Problem("model", type(module).__name__, f"does not compute the same in layers: {message}", hint=AS_IT_IS)


class _Watch:
    """Notes what the submodules give that run as they are in the chain, and which layer runs."""

    def __init__(self, module: nn.Module, chain: nn.Sequential) -> None:
        self.layers = named_layers(chain)
        own = set(module.modules())
        self.modules = {
            child
            for _, layer in self.layers
            for child in ([layer.module] if isinstance(layer, Whole) else layer.modules())
            if child in own
        }
        self.calls: list[_Call] = []
        self.layer = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the calls are noted."""
        with ExitStack() as stack:
            for name, layer in self.layers:
                hook = layer.register_forward_pre_hook(lambda *_, name=name: setattr(self, "layer", name))
                stack.callback(hook.remove)
            for module in self.modules:
                stack.callback(module.register_forward_hook(self._note).remove)
            yield

    def _note(self, module: nn.Module, args: Any, result: Any) -> None:
        self.calls.append(_Call(module, self.layer, _number(args), _number(result)))


def _number(value: Any) -> float:
    """A number that another value does not have."""
    made = [tensor.detach().double() for tensor in tensors(value) if tensor.is_floating_point()]
    return sum(float((one * _weights(one)).sum()) for one in made)


@contextmanager
def _in_float64(both: nn.ModuleList) -> Iterator[None]:
    """Within it weights and buffers are copies in float64; afterwards everything is as it was."""
    modules = list(both.modules())
    parameters = {parameter: parameter.data for parameter in both.parameters()}
    gradients = {parameter: parameter.grad for parameter in parameters}
    buffers = [(each, dict(each._buffers)) for each in modules]
    plain = [(each, plain_attributes(each)) for each in modules]
    roots = [(key, value) for _, held in plain for key, value in held.items() if not isinstance(value, SCALARS)]
    objects = Snapshot(roots, lambda value: value)
    copies: dict[int, Tensor] = {}
    try:
        for parameter, data in parameters.items():
            parameter.grad, parameter.data = None, _copied(data)
        for each, held in buffers:
            for name, buffer in held.items():
                if buffer is not None:
                    each._buffers[name] = copies.setdefault(id(buffer), _copied(buffer))
        with same_hooks(modules):
            yield
    finally:
        for parameter, data in parameters.items():
            parameter.grad, parameter.data = None, data
            parameter.grad = gradients[parameter]
        objects.put(lambda value: value)
        for each, held in buffers:
            each._buffers.clear()
            each._buffers.update(held)
        for each, attributes in plain:
            for name in plain_attributes(each).keys() - attributes.keys():
                del vars(each)[name]
            vars(each).update(attributes)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to(dtype_in(tensor, torch.float64), copy=True)
