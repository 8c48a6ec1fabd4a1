"""The chain of matmuls of a model, from its profile: what tensor parallelism splits layer by layer.

    embedding -> [ + qkv -> attention -> projection ] -> [ + up -> down ] -> ... -> head

Everything between two matmuls works on each element by itself, on whatever block a device has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod

from harness.core.memory_model import DTYPE_BYTES
from harness.core.model_profile import LayerProfile, ModelProfile, Product


@dataclass(frozen=True)
class Matmul:
    """A matmul with a weight, of one micro-batch. p0, p2 and p1 divide `samples`, `inputs` and `outputs`.

    The tensors that are sent have `input_elements` and `output_elements`: for a convolution (`conv`) those of its
    images. A `look_up` has integers for inputs. A `whole` matmul is split by rows only, and what is sent is the input
    or output of its layer. Matmuls with the same `tied` share one parameter.
    """

    name: str
    samples: int
    inputs: int
    outputs: int
    input_elements: int
    output_elements: int
    weight_bytes: int
    look_up: bool = False
    whole: bool = False
    tied: str = ""
    conv: bool = False

    @cached_property
    def nameless(self) -> Matmul:
        """Equal for matmuls that differ in their names only."""
        return replace(self, name="")


@dataclass(frozen=True)
class Attention:
    """Attention between two matmuls: every head and every sample is independent."""

    samples: int
    heads: int
    input_elements: int


@dataclass(frozen=True)
class Residual:
    """A branch whose output is added to its input: both have the same layout."""

    items: tuple[Matmul | Attention, ...]
    elements: int


Item = Matmul | Attention | Residual


@dataclass(frozen=True)
class Chain:
    """The matmuls of a model for a micro-batch, `element_bytes` each element that is sent."""

    items: tuple[Item, ...]
    element_bytes: int

    @property
    def matmuls(self) -> list[Matmul]:
        return [item for item in self._inner() if isinstance(item, Matmul)]

    @property
    def attentions(self) -> list[Attention]:
        return [item for item in self._inner() if isinstance(item, Attention)]

    def _inner(self) -> Iterator[Item]:
        """Yields the items, those of branches one by one."""
        for item in self.items:
            yield from item.items if isinstance(item, Residual) else (item,)


def chain_from_profile(profile: ModelProfile) -> Chain:
    """Returns the chain of a profile.

    A layer with several matmuls is kept whole unless all are attention or linear layers in submodules. A model with
    skips is kept whole, too: its layers are not a chain.

    A layer's matmuls in one submodule ("attention.qkv", "attention.projection") are a residual branch if as many
    features leave it as enter it. Raises ValueError for a model without matmuls.
    """
    width = DTYPE_BYTES[profile.autocast or profile.dtype]
    items = [item for number in range(len(profile.layers)) for item in _layer_items(profile, number, width)]
    if not items:
        raise ValueError(f"the profile of {profile.model or 'the model'} has no matmuls to split")
    return Chain(tuple(items), width)


def _layer_items(profile: ModelProfile, number: int, width: int) -> list[Item]:
    layer = profile.layers[number]
    weights = [product for product in layer.products if product.weight_bytes]
    if len(weights) == 1 and not profile.skips:
        return [_single(profile, number, weights[0], width)]
    if profile.skips or not all(_is_sequential(product) for product in layer.products):
        return [*_whole(profile, number, weights, width)]
    items: list[Item] = []
    for _, group in groupby(_merged(layer, profile.micro_batch), key=_prefix):
        branch = [item for _, item in group]
        matmuls = [item for item in branch if isinstance(item, Matmul)]
        if matmuls[0].inputs == matmuls[-1].outputs:
            items.append(Residual(tuple(branch), matmuls[0].input_elements))
        else:
            items += branch
    return items


def _is_sequential(product: Product) -> bool:
    """Returns whether it follows those of the same submodule; without a submodule it may be parallel to others."""
    alone = product.heads == 1 and bool(_submodule(product))
    return product.kind == "attention" or (product.kind == "linear" and alone)


def _submodule(product: Product) -> str:
    return product.name.rpartition(".")[0]


def _merged(layer: LayerProfile, samples: int) -> list[tuple[str, Matmul | Attention]]:
    """Returns (submodule, item); the matmuls of one attention are one item, with the submodule of the matmul before."""
    items: list[tuple[str, Matmul | Attention]] = []
    for product in layer.products:
        previous = items[-1] if items else None
        if product.weight_bytes:
            items.append((_submodule(product), _linear(layer, product, samples)))
        elif previous and isinstance(previous[1], Matmul):
            items.append((previous[0], Attention(samples, product.heads, previous[1].output_elements)))
    return items


def _prefix(item: tuple[str, Matmul | Attention]) -> str:
    return item[0]


def _linear(layer: LayerProfile, product: Product, samples: int) -> Matmul:
    elements = _input_elements(product, samples), _output_elements(product, samples)
    return Matmul(matmul_name(layer, product), samples, product.in_, product.out, *elements, product.weight_bytes)


def _single(profile: ModelProfile, number: int, product: Product, width: int) -> Matmul:
    """Returns the only matmul of a layer: its input and output are those of the layer."""
    layer = profile.layers[number]
    matmul = _linear(layer, product, profile.micro_batch)
    if product.kind == "conv" and _split(profile, number, product):
        matmul = replace(matmul, inputs=product.image[0], conv=True)
    elif product.kind not in ("linear", "embedding") or product.heads > 1:
        (matmul,) = _whole(profile, number, [product], width)
    tied = next((tied.name for tied in layer.tied if tied.bytes == product.weight_bytes), "")
    return replace(matmul, look_up=product.kind == "embedding", tied=tied)


def _split(profile: ModelProfile, number: int, product: Product) -> bool:
    """Returns whether channels of a convolution can be split: a 2d convolution without groups, in an elementwise layer.

    A layer with another number of inputs or outputs than the convolution does more than elementwise work."""
    if len(product.image) != 3 or product.heads > 1:
        return False
    inputs, outputs = (elements(product, profile.micro_batch) for elements in (_input_elements, _output_elements))
    entering, leaving = profile.boundary_bytes(number), profile.layers[number].output_bytes
    widths = DTYPE_BYTES[profile.dtype], DTYPE_BYTES[profile.autocast or profile.dtype]
    return entering in (inputs * width for width in widths) and leaving in (outputs * width for width in widths)


def _whole(profile: ModelProfile, number: int, products: list[Product], width: int) -> list[Matmul]:
    """Returns matmuls that are kept whole: the layer's input is moved for the first of them, its output for the
    last."""
    layer, samples = profile.layers[number], profile.micro_batch
    matmuls = [
        Matmul(
            matmul_name(layer, product),
            samples,
            product.image[0] if product.image else product.in_ * product.heads,
            product.out * product.heads,
            _input_elements(product, samples),
            _output_elements(product, samples),
            product.weight_bytes,
            whole=True,
        )
        for product in products
    ]
    if matmuls:
        matmuls[0] = replace(matmuls[0], input_elements=profile.boundary_bytes(number) // width)
        matmuls[-1] = replace(matmuls[-1], output_elements=layer.output_bytes // width)
    return matmuls


def _input_elements(product: Product, samples: int) -> int:
    """Returns the elements of a matmul's input: images, integers to look up, or rows."""
    if product.image:
        return samples * prod(product.image)
    columns = 1 if product.kind == "embedding" else product.in_ * product.heads
    return samples * product.rows_per_sample * columns


def _output_elements(product: Product, samples: int) -> int:
    return samples * product.rows_per_sample * product.out * product.heads


def matmul_name(layer: LayerProfile, product: Product) -> str:
    """Returns the name of the module that has the weight."""
    same_as_layer = product.name in (layer.name, product.kind, "")
    return layer.name if same_as_layer else f"{layer.name}.{product.name}"
