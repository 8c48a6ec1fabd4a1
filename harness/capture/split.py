"""Splits a module into layers: three traces that agree, units, cuts, layers."""

from __future__ import annotations

import linecache
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.capture.agreement import Agreement, Disagreement
from harness.capture.chain import Linear
from harness.capture.cuts import cut
from harness.capture.graph import OTHER_WAY, Graph
from harness.capture.layers import Whole, build
from harness.capture.recorder import record, samples
from harness.capture.structure import Ref, template
from harness.capture.trace import Trace, Uncapturable
from harness.capture.units import Units
from harness.core.problem import Problem, ProblemError

Select = Callable[[Any], Any]
AS_IT_IS = "it trains as it is, in one stage: engine=single, ddp, fsdp or deepspeed with mesh.pipeline=1"


def split(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, select: Select | None = None
) -> nn.Sequential:
    """The module as a chain of layers, called with the tensors of `args` and `kwargs` in their order, or with the one.

    The first dimension of inputs is the sample; the chain takes any number of samples. It gives the tensors of
    `select(module(*args, **kwargs))`, one by itself, several as a tuple. It holds the module's own submodules and
    weights, and draws the same random numbers. Weights may be on any device, the meta device too: nothing is computed.
    Raises ProblemError, naming file and line, for a module whose calls depend on the values of tensors or on the number
    of samples.
    """
    kwargs = kwargs or {}
    try:
        trace, evaluates = _trace(module, args, kwargs, select)
        graph = Graph(trace)
        units = Units(graph)
        layers = cut(units)
        constants = [unit for unit in units.sequence() if unit.constant]
        return build(module, graph, Linear(graph, layers, constants).parts(), evaluates)
    except Uncapturable as error:
        raise ProblemError(_problem(module, error)) from error


def whole(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, select: Select | None = None
) -> nn.Sequential:
    """The module as one layer, with the inputs and outputs of `split`."""
    count = 0

    def numbered(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, Tensor):
            return value
        count += 1
        return Ref(count - 1)

    forms = [template(values, numbered) for values in (args, kwargs or {})]
    return nn.Sequential(OrderedDict(model=Whole(module, *forms, select)))


def _trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], select: Select | None
) -> tuple[Trace, bool]:
    """What one pass does, and whether that holds in evaluation, too."""
    batch = max(2, samples((args, kwargs)))
    one = record(module, args, kwargs, select, batch)
    attempts: list[tuple[torch.dtype | None, bool]] = [(torch.float64, True), (torch.float64, False), (None, False)]
    for number, (dtype, evaluates) in enumerate(attempts):
        try:
            two = record(module, args, kwargs, select, 2 * batch, dtype)
            three = record(module, args, kwargs, select, 3 * batch, None, not evaluates)
            return Agreement(one, two, three, evaluates).merge(), evaluates
        except (Disagreement, Uncapturable) as error:
            if number == len(attempts) - 1:
                raise Uncapturable(OTHER_WAY, error.where) from error
            one = record(module, args, kwargs, select, batch)
    raise AssertionError


def _problem(module: nn.Module, error: Uncapturable) -> Problem:
    file, line = error.where
    code = linecache.getline(file, line).strip()
    shown = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    message = f"cannot be split into layers: {shown}:{line}, `{code}`: {error.reason}"
    return Problem("model", type(module).__name__, message, hint=AS_IT_IS)
