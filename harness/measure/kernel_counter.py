"""The kernels that run within a block of code: how many, their FLOPs, and the bytes that they read and write.

Every operation that torch dispatches below autograd is one kernel, with these rules:

* Views, and whatever else returns the storage of an argument without writing to it, are none; nor is `empty`.
* A kernel reads each of its input tensors once and writes each of its outputs once, from and to main memory, as if
  there were no caches. What it changes in place it reads and writes. `fill_`, `zero_`, `copy_` and random numbers drawn
  in place only write. A broadcast tensor is read in the size that it has in memory; a look-up (embedding, gather)
  reads of its table as many bytes as come out.
* FLOPs are those of the matmuls that `harness.measure.matmul_finder` finds (linear layers, convolutions,
attention), and of
  whatever else torch's own registry knows; all other kernels are elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from harness.core.products import Product, Read
from harness.measure.column_flow import ColumnFlow
from harness.measure.matmul_finder import Products
from harness.nn.tied import tensor_bytes

_ALLOCATE = ("empty", "new_empty")
_OVERWRITE = ("fill_", "zero_", "copy_")
_LOOK_UP = ("embedding", "gather", "index", "index_select")
Watch = Callable[[Any, tuple[Any, ...], Sequence[Tensor]], None]


class Work(TorchDispatchMode):
    """Enter it in the thread that computes. All figures are sums over the kernels so far.

    `norm_bytes` are those that batch norms read. `products` name the parameters of `layer`, in the order of the
    kernels, on a micro-batch of `samples`. `watch` is called with each operation, its arguments and the tensors among
    them. The backward pass has to compute `weight_flops` for gradients of weights, `input_flops` for those of inputs,
    and to go back through elementwise kernels of `differentiated_bytes`.
    """

    def __init__(self, layer: nn.Module, samples: int, watch: Watch | None = None) -> None:
        super().__init__()
        self._watch = watch
        self.kernels = 0
        self.flops = 0
        self.bytes_moved = 0
        self.elementwise_bytes = 0
        self.norm_bytes = 0
        self.weight_flops, self.input_flops, self.differentiated_bytes = 0, 0, 0
        self.products: list[Product] = []
        self._finder, self._samples = Products(layer, samples), samples
        self._flow = ColumnFlow(layer, samples, lambda tensor: self._finder.weights.find(tensor) is not None)

    def __enter__(self) -> Self:
        self._flow.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._flow.__exit__(*error)

    @property
    def reads(self) -> tuple[Read, ...]:
        """What each product reads, and then what the layer's output shows (`harness.measure.column_flow`)."""
        return self._flow.reads

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.prim.device:  # what fake tensors ask all the time
            return result
        inputs, outputs = list(_tensors((args, tuple(kwargs.values())))), list(_tensors(result))
        if self._watch:
            self._watch(func, args, inputs)
        found: list[Product] = []
        if _is_kernel(func, inputs, outputs):
            found = self._finder.of(func, args, result)
            flops = sum(product.flops(self._samples) for product in found)
            if not found and func.overloadpacket in flop_registry:
                flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
            size = _bytes_moved(func, inputs, outputs)
            self.kernels += 1
            self.flops += flops
            self.bytes_moved += size
            self.elementwise_bytes += 0 if flops else size
            self.products += found
            self._differentiate(inputs, found, flops, size)
        if "batch_norm" in _name(func):
            self.norm_bytes += tensor_bytes(inputs[0])
        self._flow.see(func, args, kwargs, result, found)
        return result

    def _differentiate(self, inputs: Sequence[Tensor], found: Sequence[Product], flops: int, size: int) -> None:
        """Counts what the backward pass of a kernel needs, of two activations both gradients."""
        weights = [tensor for tensor in inputs if self._finder.weights.find(tensor)]
        wanted = any(tensor.requires_grad and not any(tensor is one for one in weights) for tensor in inputs)
        if not flops:
            self.differentiated_bytes += size if any(tensor.requires_grad for tensor in inputs) else 0
        elif any(product.weight_bytes for product in found):
            self.input_flops += flops * wanted
            self.weight_flops += flops * any(product.weight_bytes and not product.frozen for product in found)
        elif weights and not found:
            self.input_flops += flops * wanted
            self.weight_flops += flops * any(weight.requires_grad for weight in weights)
        else:
            self.input_flops += 2 * flops * wanted


def _is_kernel(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    if _name(func).startswith(_ALLOCATE):
        return False
    there = {t.untyped_storage()._cdata for t in inputs}
    return func._schema.is_mutable or any(t.untyped_storage()._cdata not in there for t in outputs)


def _bytes_moved(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    written = _bytes(outputs)
    if _only_writes(func):
        return _bytes(inputs[1:]) + written
    if _name(func) in _LOOK_UP:
        return min(_bytes(inputs[:1]), written) + _bytes(inputs[1:]) + written
    return _bytes(inputs) + written


def _only_writes(func: Any) -> bool:
    """Whether the first argument is overwritten without being read."""
    name = _name(func)
    return name in _OVERWRITE or (name.endswith("_") and torch.Tag.nondeterministic_seeded in func.tags)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct tensors: two views from the same place on are one, as x and its transpose are."""
    sizes: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        elements = prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        size = elements * tensor.element_size()
        place = (tensor.untyped_storage()._cdata, int(tensor.storage_offset()))
        sizes[place] = max(size, sizes.get(place, 0))
    return sum(sizes.values())


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
