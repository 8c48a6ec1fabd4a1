"""Splits a module into layers: three traces that agree, units, cuts, layers."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.capture.agreement import Agreement, Disagreement
from harness.capture.chain import Linear
from harness.capture.cuts import cut
from harness.capture.graph import OTHER_WAY, Graph
from harness.capture.layers import Whole, build, names
from harness.capture.recorder import inputs_of, is_input, record, samples
from harness.capture.structure import Ref, flat, template
from harness.capture.trace import Call, Trace, Uncapturable, shown
from harness.capture.units import LARGE, Units
from harness.core.model_profile import Unsplit
from harness.core.problem import Problem, ProblemError
from harness.nn.fake_tensors import leaving_none

Select = Callable[[Any], Any]


@dataclass(frozen=True)
class Captured:
    """A module and the layers that it was split into, for these arguments; `select` takes a part of its result."""

    module: nn.Module
    chain: nn.Sequential
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    select: Select | None = None


SAMPLES = 2
"""Of the first pass: layers do not depend on the number in the example."""
AS_IT_IS = "it trains as it is, in one stage: engine=single, ddp, fsdp or deepspeed with mesh.pipeline=1"


def split(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, select: Select | None = None
) -> nn.Sequential:
    """The module as a chain of layers, which takes `inputs(args, kwargs)`, for any number of samples.

    The first dimension of inputs is the sample; a tensor of another size there belongs to the layers that use it. The
    chain gives the tensors of `select(module(*args, **kwargs))`, one by itself, several as a tuple. It holds the
    module's own submodules and weights, and draws the same random numbers. Weights may be on any device, the meta
    device too: nothing is computed. Raises ProblemError, naming file and line, for a module whose calls depend on the
    values of tensors or on the number of samples.
    """
    try:
        return _forgotten(module, args, kwargs or {}, select)
    except Uncapturable as error:
        message = f"cannot be split into layers: {_place(error).text}"
        raise ProblemError(Problem("model", type(module).__name__, message, hint=AS_IT_IS)) from error


def split_or_whole(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, select: Select | None = None
) -> nn.Sequential:
    """As `split`; a module that cannot be split as `whole`, whose layer says why."""
    try:
        return _forgotten(module, args, kwargs or {}, select)
    except Uncapturable as error:
        chain = whole(module, args, kwargs, select)
        chain.get_submodule("model").unsplit = _place(error)  # type: ignore[assignment]
        return _named(chain)


def _forgotten(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], select: Select | None
) -> nn.Sequential:
    """As `_split`, without what its passes leave in caches outside of the module."""
    with leaving_none(module):
        return _split(module, args, kwargs, select)


def _split(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], select: Select | None) -> nn.Sequential:
    trace, evaluates = _trace(module, args, kwargs, select)
    graph = Graph(trace)
    units = Units(graph)
    layers = cut(units)
    if len(layers.layers) == 1 and (where := _large_difference(graph)):
        raise Uncapturable(OTHER_WAY, where)
    constants = [unit for unit in units.sequence() if unit.constant]
    return _named(build(module, graph, Linear(graph, layers, constants).parts(), evaluates))


def _named(chain: nn.Sequential) -> nn.Sequential:
    """The chain, which says what its weights are called in the module: checkpoints have those names."""
    chain.module_names = names(chain)  # type: ignore[assignment]
    return chain


def whole(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, select: Select | None = None
) -> nn.Sequential:
    """The module as one layer, with the inputs and outputs of `split`."""
    count = samples((args, kwargs or {}))
    numbers = itertools.count()
    others = itertools.count(len(inputs_of(args, kwargs or {})))
    shared: list[Tensor] = []

    def numbered(value: Any) -> Any:
        if is_input(value, count):
            return Ref(next(numbers))
        if not isinstance(value, Tensor) or value.requires_grad:
            return value
        shared.append(value)
        return Ref(next(others))

    given, named = (template(values, numbered) for values in (args, kwargs or {}))
    return nn.Sequential(OrderedDict(model=Whole(module, given, named, select, shared)))


def inputs(args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Tensor | tuple[Tensor, ...]:
    """What the chain of a module takes that takes these arguments: the tensors with a value for each sample."""
    return flat(inputs_of(args, kwargs or {}))


def _trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], select: Select | None
) -> tuple[Trace, bool]:
    """What a pass does for two samples, or for as many as the example has if it needs some; whether that holds in
    evaluation, too."""
    count = samples((args, kwargs))
    try:
        return _agreed(module, args, kwargs, select, SAMPLES)
    except Uncapturable as error:
        if count <= SAMPLES:
            raise
        try:
            return _agreed(module, args, kwargs, select, count)
        except Uncapturable:
            raise error from None


def _agreed(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], select: Select | None, batch: int
) -> tuple[Trace, bool]:
    first: tuple[Trace, bool] | None = None
    attempts: list[tuple[torch.dtype | None, bool]] = [(torch.float64, True), (torch.float64, False), (None, False)]
    for number, (dtype, evaluates) in enumerate(attempts):
        one = record(module, args, kwargs, select, batch)
        try:
            two = record(module, args, kwargs, select, 3 * batch, dtype, left=one.left)
            three = record(module, args, kwargs, select, 2 * batch, None, not evaluates, two.left)
            merged = Agreement(one, two, three, evaluates).merge()
        except (Disagreement, Uncapturable) as error:
            if first is None and number == len(attempts) - 1:
                raise Uncapturable(OTHER_WAY, error.where) from error
            continue
        graph = Graph(merged)
        if evaluates and not graph.can_open(graph.root):
            continue  # evaluation differs in a part that cannot run as it is
        first = first or (merged, evaluates)
        if not _large_difference(graph):
            return merged, evaluates
    assert first is not None
    return first


def _large_difference(graph: Graph) -> tuple[str, int] | None:
    """File and line where passes differ in a large part of the model, of several modules, which stays whole then."""
    total = graph.cost(graph.trace.top)

    def found(call: Call) -> tuple[str, int] | None:
        parts = [item for item in call.items if isinstance(item, Call)]
        if graph.cost(call) < LARGE * total or not parts:
            return None
        return call.differs or next(filter(None, map(found, parts)), None)

    return found(graph.trace.top)


def _place(error: Uncapturable) -> Unsplit:
    return Unsplit(*shown(error.where), error.reason)
