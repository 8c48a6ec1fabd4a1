"""Runs a module once on tensors without memory, and records its calls of modules and of torch functions.

Torch functions are seen by a TorchFunctionMode, modules by `nn.Module.__call__`, which is another one meanwhile. What
runs inside a torch function is not seen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from harness.capture.known_values import READS, KnownValues
from harness.capture.pretend import CPU, Pretender, pretended, run_for_real
from harness.capture.python_state import generators, numbers_changed, plain_attributes
from harness.capture.structure import Ref, built, template, tensors
from harness.capture.trace import Call, State, Step, Trace, Uncapturable, Value, line_of, prevented, user_line

FLOPS_FOR_A_BYTE = 5
"""A CPU core computes about so many floating-point operations in the time in which it moves a byte."""
STATISTICS = ("batch_norm", "instance_norm")
"""Functions that change running statistics without counting it."""
PASSED_ON = ("register_hook", "retain_grad", "__setitem__", "__set__", "__delitem__")
"""Functions that change their first argument in a way that its version does not show: `weight.data = ...`."""
NOT_FAKE = (RuntimeError, TypeError, ValueError)
"""What fake tensors raise where values are needed: a branch on one, .item(), .numpy()."""

Select = Callable[[Any], Any]


@dataclass(frozen=True)
class Apply:
    """`apply` of a class of the user's that has its own backward pass."""

    function: type[torch.autograd.Function]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


class Costs(TorchDispatchMode):
    """The cost of what runs, and whether it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.cost, self.flops, self.random = 0.0, 0.0, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.prim.device:
            return result
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        flops = 0
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        elif func.overloadpacket is torch.ops.aten.mkldnn_rnn_layer:
            flops = 2 * args[0].shape[0] * args[0].shape[1] * (args[1].numel() + args[2].numel())
        there = {tensor.untyped_storage()._cdata for tensor in tensors(args)}
        made = [tensor for tensor in tensors(result) if tensor.untyped_storage()._cdata not in there]
        moved = sum(t.numel() * t.element_size() for t in (*made, *(tensors(args) if made else ())))
        self.flops += flops
        self.cost += flops + FLOPS_FOR_A_BYTE * moved
        return result


COUNTS = "each pass changes the number `{}`, which what follows may depend on"
DRAWS = "it draws random numbers by Python's `random` or NumPy, so that each pass may be another one"
IN_FUNCTION = "it calls a module inside of an autograd function, as checkpoints with use_reentrant=True do"


class Recorder(TorchFunctionMode):
    """Records the forward pass of a module whose tensors are fake: what is in `top`."""

    def __init__(self, module: nn.Module, places: dict[int, State], pretender: Pretender) -> None:
        super().__init__()
        self.paths = {each: path for path, each in module.named_modules()}
        self.places, self.pretender = places, pretender
        self.values: list[Value] = []
        self.numbers: dict[int, int] = {}
        self.kept: list[Tensor] = []  # so that no id comes again
        self.weights = _size(module)
        self.root = module
        self.current = self.top = Call("", module, (), {}, True, ("", 0))
        self.costs = Costs()
        self.known = KnownValues()
        self.generators = generators()
        self.off = self.in_function = False

    def number(self, tensor: Tensor, source: Any = None) -> int:
        """The number of a tensor; one that is not known was not made by a function that is seen."""
        if id(tensor) not in self.numbers:
            if source is None:
                source = self.places.get(id(tensor), None if isinstance(tensor, FakeTensor) else tensor)
            self._add(tensor, source)
        return self.numbers[id(tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.function(func, args, kwargs or {}, func)

    def function(self, name: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Run a function and record it under `name`."""
        if self.off:
            return run(*args, **kwargs)
        given = tensors((args, kwargs))
        known = self.known.has_all(given)
        if known and given and getattr(name, "__name__", "") in READS:
            return self.known.run(run, args, kwargs)
        versions = [tensor._version for tensor in given]
        grad = torch.is_grad_enabled()
        costs = self.costs
        costs.cost, costs.flops, costs.random = 0.0, 0.0, False
        result = run(*args, **kwargs)
        cost, flops, random = costs.cost, costs.flops, costs.random
        mutated = [t for t, before in zip(given, versions, strict=True) if t._version != before]
        if any(result is tensor for tensor in given) and not any(result is tensor for tensor in mutated):
            result = torch.ops.aten.alias(result)  # contiguous, to, dropout: other passes may give another tensor
        if getattr(name, "__name__", "") in STATISTICS:
            mutated += [t for t in given if not t.requires_grad and id(t) in self.places]
        if getattr(name, "__name__", "") in PASSED_ON:
            mutated += [t for t in given[:1] if not any(t is one for one in mutated)]
        if not (tensors(result) or mutated):
            return result
        if known and not random:
            self.known.extend(run, args, kwargs, result)
        elif mutated:
            self.known.forget(mutated)
        step = Step(name, self._template(args), self._template(kwargs), None, grad, user_line())
        step.cost, step.flops, step.random = cost, flops, random
        step.mutated = tuple(self.number(t) for t in mutated)
        step.result = template(result, self._made)
        self.current.items.append(step)
        return result

    def module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module and record its call."""
        if self.off or module not in self.paths:
            return original(module, *args, **kwargs)
        if self.in_function:
            raise Uncapturable(IN_FUNCTION, user_line())
        call = Call(
            self.paths[module],
            module,
            self._template(args),
            self._template(kwargs),
            torch.is_grad_enabled(),
            user_line(),
        )
        self._look_for_draws()
        parent, self.current = self.current, call
        before = plain_attributes(module)
        try:
            result = original(module, *args, **kwargs)
            self._look_for_draws()
            if changed := numbers_changed(before, plain_attributes(module)):
                self.keep_whole(COUNTS.format(next(iter(changed))), line_of(type(module).forward))
        except NOT_FAKE as error:
            result = self._opaque(call, error, args, kwargs)
        finally:
            self.current = parent
        if not call.opaque:
            call.result = self._template(result)
        parent.items.append(call)
        return result

    def _opaque(self, call: Call, error: Exception, args: Any, kwargs: Any) -> Any:
        """The result of a module whose own Python code needs values, with what it leaves in attributes: it stays whole.
        Raises `error` for the model itself, and for most of it."""
        if self._is_most(call.module):
            raise error
        self.off = True
        try:
            with unset_fake_temporarily():
                result, left = run_for_real(call.module, args, kwargs, self.pretender)
        except NOT_FAKE:
            raise error from None
        finally:
            self.off = False
        if not tensors(result):
            raise error  # they are in an object that is not opened, or there are none
        call.items.clear()
        call.opaque = True
        call.leaves = tuple(State(self.paths[each], "__dict__", name) for each, name in left)
        call.holds = tuple(map(self.number, (*call.module.parameters(), *call.module.buffers())))
        samples = max((t.shape[0] for t in tensors(args) if t.dim()), default=1)
        call.flops = 2.0 * _size(call.module) * samples
        call.result = template((result, *left.values()) if left else result, self._made)
        return result

    def _look_for_draws(self) -> None:
        """Keeps the module whole that runs, if it has drawn random numbers in Python since the last look."""
        before, self.generators = self.generators, generators()
        if before != self.generators:
            self.keep_whole(DRAWS, line_of(type(self.current.module).forward))

    def keep_whole(self, reason: str, where: tuple[str, int] | None = None) -> None:
        """The module that runs stays one unit. Raises Uncapturable for the model itself, and for most of it."""
        where = where or user_line()
        if self._is_most(self.current.module):
            raise Uncapturable(reason, where)
        self.current.differs = where

    def _is_most(self, module: nn.Module) -> bool:
        """Whether it is the model itself, or has most of its weights."""
        return module is self.root or 2 * _size(module) > self.weights

    def _template(self, value: Any) -> Any:
        return template(value, self._leaf)

    def _leaf(self, value: Any) -> Any:
        return Ref(self.number(value)) if isinstance(value, Tensor) else value

    def _made(self, value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) not in self.numbers:
            self._add(value, self.places.get(id(value), _MADE))
        return self._leaf(value)

    def _add(self, tensor: Tensor, source: Any) -> None:
        self.numbers[id(tensor)] = len(self.values)
        self.kept.append(tensor)
        strided = tensor.layout is torch.strided
        self.values.append(
            Value(
                number=len(self.values),
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                bytes=tensor.numel() * tensor.element_size(),
                storage=tensor.untyped_storage()._cdata if strided else -id(tensor),
                requires_grad=tensor.requires_grad,
                source=None if source is _MADE else source,
                unknown=source is None,
            )
        )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


_MADE = object()


def record(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    select: Select | None,
    batch: int,
    dtype: torch.dtype | None = None,
    training: bool = True,
    left: dict[tuple[nn.Module, str], float] | None = None,
) -> Trace:
    """The trace of `select(module(*args, **kwargs))` for `batch` samples, its floating-point weights in `dtype`, after
    passes that have `left` numbers in attributes.

    Raises Uncapturable where the pass depends on values of tensors, and whatever the module raises.
    """
    pretender = Pretender(FakeTensorMode(allow_non_fake_inputs=True), dtype, left=left or {})
    with pretended(module, pretender, training) as places:
        recorder = Recorder(module, places, pretender)
        example = samples((args, kwargs))

        def fake(value: Any) -> Any:
            if is_input(value, example):
                made = pretender.tensor(value, (batch, *value.shape[1:]))
                inputs.append(recorder.number(made, len(inputs)))
                return made
            if not isinstance(value, Tensor) or value.requires_grad:
                return value
            shared = pretender.tensor(value)
            recorder.number(shared, value)
            return shared

        inputs: list[int] = []
        given = [built(template(values, fake), lambda value: value) for values in (args, kwargs)]
        with _recording(recorder):
            try:
                result = module(*given[0], **given[1])
                result = select(result) if select else result
            except NOT_FAKE as error:
                raise Uncapturable(*prevented(error)) from error
        replaced = _replaced(module, recorder)
        form = recorder._template(result)
    trace = Trace(recorder.top, recorder.values, inputs, form, replaced, batch, pretender.left)
    trace.forget_unread()
    return trace


def samples(values: Any) -> int:
    """The number of samples: the first size of the first tensor that has one; 1 where there is none."""
    return next((len(tensor) for tensor in tensors(values) if tensor.dim()), 1)


def is_input(value: Any, count: int) -> bool:
    """Whether a value is a tensor of `count` samples: the others, as masks for all samples, belong to the layers."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that have a value for each sample, in order."""
    count = samples((args, kwargs))
    return [tensor for tensor in tensors((args, kwargs)) if is_input(tensor, count)]


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]

    def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.module(call, module, args, kwargs)

    def recorded_apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, recorder.in_function = recorder.in_function, True
            try:
                with torch._C.DisableTorchFunction():
                    return apply.__func__(cls, *args, **kwargs)
            finally:
                recorder.in_function = before

        return recorder.function(Apply(cls), args, kwargs, run)

    differentiate = torch.autograd.grad

    def recorded_grad(*args: Any, **kwargs: Any) -> Any:
        recorder.keep_whole("it asks for gradients in its forward pass")
        return differentiate(*args, **kwargs)

    log = logging.getLogger(FakeTensor.__module__)
    level = log.level

    def unknown(value: Any) -> bool:
        return isinstance(value, FakeTensor) and not recorder.known.has(value)

    with ExitStack() as stack:
        log.setLevel(logging.CRITICAL)  # modules that stay whole
        stack.callback(log.setLevel, level)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder.pretender.mode)
        stack.enter_context(recorder.costs)
        stack.enter_context(CPU)
        stack.enter_context(recorder)
        stack.enter_context(patch.object(nn.Module, "__call__", recorded_call))
        stack.enter_context(patch.object(torch.autograd.Function, "apply", classmethod(recorded_apply)))
        stack.enter_context(patch.object(torch.autograd, "grad", recorded_grad))
        stack.enter_context(patch.object(transformer, "_detect_is_causal_mask", _causal_if_said))
        if hugging_face := sys.modules.get("transformers.utils.import_utils"):
            stack.enter_context(
                patch.object(hugging_face, "is_fake_tensor", unknown)
            )  # no other masks for fake tensors
        yield


def _causal_if_said(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Stands for a function of nn.Transformer that reads the mask, to find a faster kernel."""
    return bool(is_causal)


def _replaced(module: nn.Module, recorder: Recorder) -> dict[State, int]:
    """Buffers and tensors among the attributes that are other tensors now."""
    found = {}
    held = {place: identity for identity, place in recorder.places.items()}
    modules = dict(module.named_modules())
    for place, identity in held.items():
        now = getattr(modules[place.path], place.table).get(place.name)
        if isinstance(now, Tensor) and id(now) != identity and id(now) in recorder.numbers:
            found[place] = recorder.numbers[id(now)]
    return found
