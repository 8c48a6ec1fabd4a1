"""What one forward pass does: a tree of module calls, with the torch functions between them.

    call "" -- call "embed"                     Call: a module, its arguments and result
            |- torch.add                        Step: a torch function
            |- call "blocks.0" -- call "blocks.0.attention" ...

Tensors are numbered in the order in which they appear: inputs, weights and buffers where they are used, results.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from harness.capture.structure import Nest, refs

HERE = str(Path(__file__).parent)
LIBRARY = str(Path(torch.__file__).parent)


class Uncapturable(Exception):
    """A forward pass cannot be recorded; `where` is file and line of what prevents it."""

    def __init__(self, reason: str, where: tuple[str, int]) -> None:
        super().__init__(reason)
        self.reason, self.where = reason, where


@dataclass(frozen=True)
class State:
    """A tensor that a module holds: under `name` in its `_parameters`, `_buffers` or plain attributes (`__dict__`)."""

    path: str
    table: str
    name: str


@dataclass
class Value:
    """A tensor of the trace. `source` is the number of an input, a `State`, a tensor from elsewhere, or None."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    storage: int
    requires_grad: bool
    source: int | State | Tensor | None = None
    unknown: bool = False
    """Whether no function that is seen has made it."""
    batch_dim: tuple[int, int] | None = None
    """(dimension, factor): its size there is this factor times the number of samples."""
    follows_dtype: bool = False
    """Whether its dtype is that of the model's weights."""

    @property
    def trained(self) -> bool:
        """Whether it is a weight."""
        return self.requires_grad and self.source is not None and not isinstance(self.source, int)


@dataclass
class Step:
    """A call of a torch function. `flops` are those of matmuls, `cost` adds bytes moved; `where` is (file, line)."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    result: Any
    grad: bool
    where: tuple[str, int]
    cost: float = 0.0
    flops: float = 0.0
    random: bool = False
    mutated: tuple[int, ...] = ()

    @property
    def items(self) -> list[Step | Call]:
        return []


@dataclass
class Call:
    """A call of a module. `opaque`: what is inside is not known, since it depends on the values of tensors; then
    `holds` are the weights and buffers that it may use, and tensors that it `leaves` in attributes of its modules come
    after its own result: (result, left, ...)."""

    path: str
    module: nn.Module
    args: Any
    kwargs: Any
    grad: bool
    where: tuple[str, int]
    result: Any = None
    items: list[Step | Call] = field(default_factory=list)
    opaque: bool = False
    flops: float = 0.0
    holds: tuple[int, ...] = ()
    leaves: tuple[State, ...] = ()
    differs: tuple[str, int] | None = None
    """Where passes of different size or dtype, or evaluation, take another way inside of it."""

    def has_opaque(self) -> bool:
        """Whether it, or a call inside, is opaque."""
        return self.opaque or any(isinstance(item, Call) and item.has_opaque() for item in self.items)

    def steps(self) -> Iterator[Step]:
        """All torch functions inside."""
        for item in self.items:
            if isinstance(item, Call):
                yield from item.steps()
            else:
                yield item


Item = Step | Call


def used(item: Item) -> set[int]:
    """The tensors that are given to it."""
    return {*refs(item.args), *refs(item.kwargs)}


@dataclass
class Trace:
    """A forward pass: the call of the model and the steps of `select` after it. `outputs` are numbers of tensors.

    `replaced` are buffers and attributes that hold another tensor afterwards, `left` numbers in attributes that this
    pass and those before it have changed.
    """

    top: Call
    values: list[Value]
    inputs: list[int]
    result: Any
    replaced: dict[State, int]
    batch: int
    left: dict[tuple[nn.Module, str], float]

    @property
    def outputs(self) -> list[int]:
        return refs(self.result)

    def forget_unread(self) -> None:
        """Of what opaque modules leave in attributes keep what is read."""
        items = list(_inside(self.top))
        read = {*self.outputs, *self.replaced.values()}.union(*map(used, items))
        for call in items:
            if isinstance(call, Call) and call.leaves:
                result, *left = call.result.items
                kept = [(state, ref) for state, ref in zip(call.leaves, left, strict=True) if ref.number in read]
                call.leaves = tuple(state for state, _ in kept)
                call.result = Nest(tuple, (result, *(ref for _, ref in kept))) if kept else result


def _inside(call: Call) -> Iterator[Item]:
    for item in call.items:
        yield item
        if isinstance(item, Call):
            yield from _inside(item)


def user_line() -> tuple[str, int]:
    """File and line of the innermost frame that is the user's: neither torch's nor of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def line_of(function: Any) -> tuple[str, int]:
    """File and line of a function's definition."""
    code = inspect.unwrap(function).__code__
    return code.co_filename, code.co_firstlineno


def shown(where: tuple[str, int]) -> tuple[str, int, str]:
    """A line as people read it: its file, from the working directory on if it is there, its number and its text."""
    file, line = where
    near = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return near, line, linecache.getline(file, line).strip()


def is_library(file: str) -> bool:
    """Whether a source file is torch's or of this package."""
    return file.startswith((HERE, LIBRARY, "<"))


def prevented(error: BaseException) -> tuple[str, tuple[str, int]]:
    """What prevents a recording, and where: the innermost line of the user's."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [(file, line) for file, line in frames if not is_library(file)]
    return _reason(error), [*frames[-1:], *users][-1]


def _reason(error: BaseException) -> str:
    if isinstance(error, DataDependentOutputException):
        return "it reads the value of a tensor, which another batch would change"
    if isinstance(error, DynamicOutputShapeException):
        return "the size of its result depends on the values of tensors"
    return str(error).partition("\n")[0]
