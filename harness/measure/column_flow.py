"""Follows columns (features) through the kernels of a layer, from each product to those that read its output: what
`harness.core.products.Read` records.

Whoever splits a product's output by columns, and the next product's input in the same way, computes the same only if
everything between them works column by column, or head by head in attention. So an operation must be known to do so:
views, casts, what torch tags as pointwise, what works along other dimensions. After all others columns are MIXED.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from math import gcd, prod
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakTensorKeyDictionary

from harness.core.products import INPUT, Product, Read
from harness.measure.columns import MIXED, Columns, Factor, Heads, combined, expanded, merged, plain, reshaped, sliced
from harness.nn.dropout import Dropout

_aten = torch.ops.aten
_DIMS = (2, 3)
"""Numbers of dimensions of what has its features in the last one; images have more."""


class ColumnFlow:
    """Enter it around one forward pass of `layer`, on a micro-batch of `samples`; show it each kernel to `see`."""

    def __init__(self, layer: nn.Module, samples: int, is_weight: Callable[[Tensor], bool]) -> None:
        self._layer, self._samples, self._is_weight = layer, samples, is_weight
        self._columns = WeakTensorKeyDictionary()
        self._numbers = count(1)
        self._known = True
        self._reads: list[Read] = []
        self._first: dict[int, int] = {}
        self._hooks: list[Any] = []

    @property
    def reads(self) -> tuple[Read, ...]:
        """What each product read, then what the layer's output shows; () for layers of images or of several tensors."""
        return tuple(self._reads) if self._known else ()

    def __enter__(self) -> None:
        self._hooks = [self._layer.register_forward_pre_hook(self._enters)]
        for module in self._layer.modules():
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm, _BatchNorm, Dropout)):
                self._hooks.append(module.register_forward_hook(self._keeps))
        self._hooks.append(self._layer.register_forward_hook(self._leaves))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    # -- modules ----------------------------------------------------------------------------------------------------

    def _enters(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        """The layer's input; integers, as tokens, have no columns."""
        tensor = given[0] if len(given) == 1 else None
        if not isinstance(tensor, Tensor) or (tensor.is_floating_point() and tensor.dim() not in _DIMS):
            self._known = False
        elif tensor.is_floating_point():
            self._put(tensor, Columns(tensor.shape[-1], frozenset({INPUT}), plain(tensor.shape, tensor.shape[-1])))

    def _keeps(self, module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        """Norms over all columns, and dropout: engines know how to split them."""
        columns = self._columns.get(given[0])
        if columns is None:
            return
        size = getattr(module, "normalized_shape", ())
        norm = not isinstance(module, Dropout)
        wrong = norm and not (columns.last() and (len(size) == 1 or given[0].dim() == 2))
        self._put(output, MIXED if wrong else replace(columns, tensor=0))

    def _leaves(self, _: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() not in _DIMS:
            self._known = False
        else:
            self._reads.append(self._read(output, -1))

    # -- kernels ----------------------------------------------------------------------------------------------------

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, found: list[Product]) -> None:
        """A kernel or a view that has run, and the products that it is."""
        if found:
            self._product(func, args, result, found)
            return
        read = [one for one in _tensors((args, tuple(kwargs.values()))) if one in self._columns]
        name = str(func.overloadpacket.__name__)
        if read and not name.endswith("_like") and not name.startswith("new_"):  # these make tensors of constants
            made = _tensors(result)
            for tensor, columns in zip(made, self._after(func, args, kwargs, made, read), strict=True):
                self._put(tensor, columns)

    def _after(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor], read: list[Tensor]
    ) -> list[Columns]:
        """The columns of each result."""
        rule = _RULES.get(func.overloadpacket)
        if rule and args and isinstance(args[0], Tensor) and args[0] in self._columns:
            columns = self._columns[args[0]]
            return [MIXED] * len(made) if columns == MIXED else rule(columns, args[1:], kwargs, made)
        if func.overloadpacket in (_aten.cat, _aten.stack):
            return [self._joined(func, args, made[0])]
        if torch.Tag.pointwise in func.tags and len(made) == 1:
            each = [self._columns[one] for one in read]
            return [combined([one if one == MIXED else expanded(one, made[0].shape) for one in each])]
        return [MIXED] * len(made)

    def _joined(self, func: Any, args: tuple[Any, ...], made: Tensor) -> Columns:
        """Tensors in a row along a dimension, which may be a new one."""
        parts, axis = args[0], (args[1] if len(args) > 1 else 0) % made.dim()
        if not all(one in self._columns for one in parts):
            return MIXED
        each = [self._columns[one] for one in parts]
        if func.overloadpacket is _aten.stack:
            each = [
                one if one == MIXED else reshaped(one, _with_1(part.shape, axis))
                for one, part in zip(each, parts, strict=True)
            ]
        found = combined(each, mixed=(axis,))
        if found == MIXED:
            return MIXED
        dims = list(found.dims)
        dims[axis] = merged([(made.shape[axis], 0)])
        return replace(found, dims=tuple(dims))

    def _put(self, tensor: Tensor, columns: Columns) -> None:
        """A tensor that is made, or shown otherwise, has a number of its own unless it has that of what it shows."""
        number = columns.tensor or next(self._numbers)
        self._columns[tensor] = columns if columns == MIXED else replace(columns, tensor=number)

    # -- products -----------------------------------------------------------------------------------------------------

    def _product(self, func: Any, args: tuple[Any, ...], result: Any, found: list[Product]) -> None:
        number, made = len(self._reads), _tensors(result)[0]
        if func.overloadpacket in _PLUS:
            args = args[1:]
        if len(found) == 2:
            self._attention(args, made)
        elif found[0].kind == "embedding":
            self._reads.append(Read())
            self._made(made, number, -1)
        elif found[0].kind == "linear" and found[0].heads == 1:
            right = self._is_weight(args[1])
            axis = -1 if right else -2
            self._reads.append(self._read(args[0] if right else args[1], axis))
            self._made(made, number, axis)
        elif found[0].kind == "attention" and made.dim() == 3:
            self._matrices(args, made)
        else:
            self._reads.append(Read())
            self._put(made, MIXED)

    def _read(self, tensor: Tensor, axis: int) -> Read:
        """What a product reads along a dimension, or a layer gives."""
        columns = self._columns.get(tensor, MIXED)
        if not columns.sources or not columns.last(axis):
            return Read()
        return Read(tuple(sorted(columns.sources)), self._first.setdefault(columns.tensor, len(self._reads)))

    def _made(self, made: Tensor, number: int, axis: int) -> None:
        width = made.shape[axis]
        self._put(made, Columns(width, frozenset({number}), plain(made.shape, width, axis)))

    def _attention(self, args: tuple[Any, ...], made: Tensor) -> None:
        """A fused kernel: (samples, heads, tokens, columns of a head)."""
        samples, heads, tokens, size = made.shape
        read = _attended([self._heads(one, (0, 1), 3) for one in args[:3]])
        self._reads += [read, read]
        dims = [(samples, 0)], [(heads, size)], [(tokens, 0)], [(size, 1)]
        self._put(made, _joined(read, heads * size, dims))

    def _matrices(self, args: tuple[Any, ...], made: Tensor) -> None:
        """Queries times keys, or these scores times values: (samples x heads, tokens, columns of a head)."""
        scores = self._columns.get(args[0], MIXED).scores
        if scores:
            read = _attended([*scores, self._heads(args[1], (0,), 2)])
            heads, tokens, size = made.shape[0] // self._samples, *made.shape[1:]
            self._reads.append(read)
            split = [(self._samples, 0), (heads, size)], [(tokens, 0)], [(size, 1)]
            self._put(made, _joined(read, heads * size, split))
            return
        query, key = self._heads(args[0], (0,), 2), self._heads(args[1], (0,), 1)
        if query is None or key is None or query.heads != key.heads:
            self._reads.append(Read())
            self._put(made, MIXED)
            return
        read = Read(tuple(sorted(query.sources | key.sources)), heads=gcd(query.groups, key.groups))
        rows = [[(size, 0)] for size in made.shape[1:]]
        self._reads.append(read)
        dims = [(self._samples, 0), (query.heads, query.size)], *rows
        found = _joined(read, query.heads * query.size, dims)
        self._put(made, replace(found, grain=query.size, scores=(query, key)))

    def _heads(self, tensor: Tensor, batch: Sequence[int], axis: int) -> Heads | None:
        columns = self._columns.get(tensor, MIXED)
        return None if columns == MIXED else columns.per_head(self._samples, batch, axis)


def _attended(parts: Sequence[Heads | None]) -> Read:
    """What attention reads: queries, keys and values of three products, or the thirds of one. Heads of anything else
    are not known to be split as they are."""
    known = [part for part in parts if part]
    if len(known) < 3 or any(len(part.sources) != 1 for part in known):
        return Read()
    query, key, value = known
    sources = frozenset[int]().union(*(part.sources for part in known))
    whole = all(part.offset == 0 and part.width == part.groups * part.size for part in known)
    thirds = [0, query.width // 3, query.width // 3 * 2] == [part.offset for part in known]
    equal = all(part.groups == query.heads and part.width == 3 * query.heads * part.size for part in known)
    if (
        query.heads % key.heads
        or key.heads != value.heads
        or not ((len(sources) == 3 and whole) or (len(sources) == 1 and thirds and equal))
    ):
        return Read()
    return Read(tuple(sorted(sources)), heads=gcd(*(part.groups for part in known)))


def _joined(read: Read, width: int, dims: Sequence[Sequence[Factor]]) -> Columns:
    """The columns of what attention gives, if its heads can be split."""
    return Columns(width, frozenset(read.sources), tuple(map(merged, dims))) if read.sources else MIXED


# -- rules: the columns of the first argument, all further arguments, and the results -----------------------------

Rule = Callable[[Columns, tuple[Any, ...], dict[str, Any], list[Tensor]], list[Columns]]


def _same(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    return [columns] * len(made)


def _reshape(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    return [reshaped(columns, made[0].shape)]


def _expand(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    return [expanded(columns, made[0].shape)]


def _permute(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    return [replace(columns, dims=tuple(columns.dims[n] for n in args[0]))]


def _transpose(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    """Of two dimensions, or of the only two."""
    order = list(range(len(columns.dims)))
    first, second = args or (0, -1)
    order[first], order[second] = order[second], order[first]
    return _permute(columns, (order,), kwargs, made)


def _parts(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    """Neighbouring parts of a dimension."""
    axis, first, found = (args[1] if len(args) > 1 else 0), 0, []
    for part in made:
        found.append(sliced(columns, axis, first, part.shape[axis]))
        first += part.shape[axis]
    return found


def _slice(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    axis, first, step = (args[n] if len(args) > n else default for n, default in ((0, 0), (1, 0), (3, 1)))
    size = prod(size for size, _ in columns.dims[axis])
    first = (first or 0) + (size if (first or 0) < 0 else 0)
    return [sliced(columns, axis, max(0, first), made[0].shape[axis], step)]


def _select(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    axis, index = args[:2]
    size = prod(size for size, _ in columns.dims[axis])
    return [reshaped(sliced(columns, axis, index % size, 1), made[0].shape)]


def _unbind(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    axis = args[0] if args else 0
    return [_select(columns, (axis, index), kwargs, [one])[0] for index, one in enumerate(made)]


def _along(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    """Of the same shape, from all along a dimension."""
    return [combined([columns], (args[0] % len(columns.dims),))] * len(made)


def _reduce(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    """Dimensions that become one number, which is left or not."""
    axes = [axis % len(columns.dims) for axis in (args[0] if args and args[0] else range(len(columns.dims)))]
    found = combined([columns], axes)
    if found == MIXED:
        return [MIXED]
    dims = tuple(() if n in axes else dim for n, dim in enumerate(found.dims))
    return [reshaped(replace(found, dims=dims), made[0].shape)]


def _as_complex(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    found = combined([columns], (len(columns.dims) - 1,))
    return [found if found == MIXED else replace(found, dims=found.dims[:-1])]


def _as_real(columns: Columns, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Columns]:
    return [replace(columns, dims=(*columns.dims, merged([(2, 0)])))]


_PLUS = (_aten.addmm, _aten.baddbmm)
"""Products whose first argument is added to them."""
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((_aten.clone, _aten._to_copy, _aten.detach, _aten.alias, _aten.native_dropout), _same),
    **dict.fromkeys((_aten.view, _aten._unsafe_view, _aten.unsqueeze, _aten.squeeze, _aten._reshape_alias), _reshape),
    **dict.fromkeys((_aten.transpose, _aten.t), _transpose),
    **dict.fromkeys((_aten.split, _aten.split_with_sizes), _parts),
    **dict.fromkeys((_aten._softmax, _aten._log_softmax, _aten.cumsum), _along),
    **dict.fromkeys((_aten.sum, _aten.mean, _aten.amax, _aten.amin), _reduce),
    _aten.expand: _expand,
    _aten.permute: _permute,
    _aten.slice: _slice,
    _aten.select: _select,
    _aten.unbind: _unbind,
    _aten.view_as_complex: _as_complex,
    _aten.view_as_real: _as_real,
}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for item in value for one in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _with_1(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis:])
