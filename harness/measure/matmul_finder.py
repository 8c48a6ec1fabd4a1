"""The matmuls that kernels do, and whose weights they use: what `harness.core.products.Product` records of
a layer.

These kernels are known: mm, addmm, bmm, baddbmm, convolution, fused attention of any kind, embedding. All matmuls of a
network are made of them, but for custom kernels and operations that torch counts no FLOPs for, as a dot product.

    factors of mm, bmm      what is found
    a weight, on any side   linear, with the weight on the right: (A B)^T = B^T A^T. Its heads are the matrices that the
                            parameter holds; one that is spread over a batch stays one
    no weight               attention: batch = samples x heads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.core.products import Product

_aten = torch.ops.aten
_COPIES = (_aten._to_copy, _aten.clone)


class Weight(NamedTuple):
    """A parameter: the path of its submodule in the layer, its elements and bytes, and whether it is not trained."""

    path: str
    elements: int
    bytes: int
    frozen: bool


class Weights:
    """The parameters of a layer, found by their place in memory; views and copies of them count as they do."""

    def __init__(self, layer: nn.Module) -> None:
        self._places: dict[int, Weight] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that their memory is not reused
        for name, parameter in layer.named_parameters():
            size = parameter.numel()
            path, frozen = name.rpartition(".")[0], not parameter.requires_grad
            self._put(parameter, Weight(path, size, size * parameter.element_size(), frozen))

    def follow(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """See a kernel that has run: it may have cast a weight, as autocast does."""
        if func.overloadpacket in _COPIES and (weight := self.find(args[0])):
            self._put(result, weight)

    def find(self, tensor: Tensor) -> Weight | None:
        """The parameter that `tensor` is a view or a copy of; None for others."""
        return self._places.get(tensor.untyped_storage()._cdata)

    def _put(self, tensor: Tensor, weight: Weight) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._places[storage._cdata] = weight


class Products:
    """Finds the matmuls of a layer's kernels, which compute a micro-batch of `samples`."""

    def __init__(self, layer: nn.Module, samples: int) -> None:
        self.weights, self._samples = Weights(layer), samples

    def of(self, func: Any, args: tuple[Any, ...], result: Any) -> list[Product]:
        """Return the matmuls of one kernel that has run. Called for each kernel in turn."""
        self.weights.follow(func, args, result)
        rule = _RULES.get(func.overloadpacket)
        return rule(self, args, result) if rule else []

    def _matrices(self, args: tuple[Any, ...], result: Any) -> list[Product]:
        left, right = args[:2]
        batch = left.shape[0] if left.dim() == 3 else 1
        rows, in_, out = left.shape[-2], left.shape[-1], right.shape[-1]
        if weight := self.weights.find(right):
            return [self._linear(weight, batch, rows, in_, out)]
        if weight := self.weights.find(left):
            return [self._linear(weight, batch, out, in_, rows)]
        return [self._of_activations("attention", batch, rows, in_, out)]

    def _matrices_and_sum(self, args: tuple[Any, ...], result: Any) -> list[Product]:
        return self._matrices(args[1:], result)

    def _linear(self, weight: Weight, batch: int, rows: int, in_: int, out: int) -> Product:
        heads = gcd(batch, max(1, weight.elements // max(1, in_ * out)))
        return self._of_weight("linear", weight, rows * (batch // heads), in_, out, heads)

    def _convolution(self, args: tuple[Any, ...], result: Any) -> list[Product]:
        """A weight is (out, in / groups, kernel), a transposed one (in, out / groups, kernel)."""
        inputs, weight, transposed, groups = args[0], args[1], args[6], args[8]
        place, (first, second, *kernel) = self.weights.find(weight), weight.shape
        if transposed:
            sizes = _positions(inputs), first // groups, second * prod(kernel)
        else:
            sizes = _positions(result), second * prod(kernel), first // groups
        alone = not transposed and len(inputs) == self._samples
        image = tuple(inputs.shape[1:]) if alone else ()
        return [replace(self._of_weight("conv", place, *sizes, groups), image=image)]

    def _attention(self, args: tuple[Any, ...], result: Any) -> list[Product]:
        """Queries, keys and values are (samples, heads, tokens, head size); there may be fewer heads of the latter."""
        query, key, value = (tensor.shape for tensor in args[:3])
        batch, queries, keys = query[0] * query[1], query[2], key[2]
        return [
            self._of_activations("scores", batch, queries, query[3], keys),
            self._of_activations("values", batch, queries, keys, value[3]),
        ]

    def _embedding(self, args: tuple[Any, ...], result: Any) -> list[Product]:
        """Return the lookup; if the first dimension of the indices is not the sample, all samples share it."""
        table, indices = args[:2]
        rows = indices.numel() * (1 if indices.shape[:1] == (self._samples,) else self._samples)
        vocabulary, width = table.shape
        return [self._of_weight("embedding", self.weights.find(table), rows, vocabulary, width, 1)]

    def _of_weight(self, kind: str, weight: Weight | None, rows: int, in_: int, out: int, heads: int) -> Product:
        path, size, frozen = (weight.path, weight.bytes, weight.frozen) if weight else (kind, 0, False)
        return self._by_sample(Product(path, kind, rows, in_, out, size, heads, frozen=frozen))

    def _of_activations(self, name: str, batch: int, rows: int, in_: int, out: int) -> Product:
        heads, rest = divmod(batch, self._samples)
        if rest == 0:
            return Product(name, "attention", rows, in_, out, heads=heads)
        return self._by_sample(Product(name, "attention", rows, in_, out, heads=batch))

    def _by_sample(self, product: Product) -> Product:
        """Divide the rows of `product` by the samples; if there is a remainder, it is done once for the micro-batch."""
        rows, rest = divmod(product.rows_per_sample, self._samples)
        return replace(product, kind="once") if rest else replace(product, rows_per_sample=rows)


def _positions(images: Tensor) -> int:
    """Number of positions of images (n, channels, *sides), in all samples."""
    return images.shape[0] * prod(images.shape[2:])


_RULES: dict[Any, Callable[[Products, tuple[Any, ...], Any], list[Product]]] = {
    _aten.mm: Products._matrices,
    _aten.bmm: Products._matrices,
    _aten.addmm: Products._matrices_and_sum,
    _aten.baddbmm: Products._matrices_and_sum,
    _aten.convolution: Products._convolution,
    _aten._convolution: Products._convolution,
    _aten.convolution_overrideable: Products._convolution,
    _aten._scaled_dot_product_flash_attention_for_cpu: Products._attention,
    _aten._scaled_dot_product_flash_attention: Products._attention,
    _aten._scaled_dot_product_efficient_attention: Products._attention,
    _aten._scaled_dot_product_cudnn_attention: Products._attention,
    _aten._scaled_dot_product_fused_attention_overrideable: Products._attention,
    _aten.embedding: Products._embedding,
}
