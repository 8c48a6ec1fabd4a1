"""What of a model is split layer by layer: its matrix products in a row, as a profile tells of them.

    embedding -> [ + qkv -> attention -> projection ] -> [ + up -> down ] -> ... -> head

Everything between two products works on each element by itself, on whatever block a device has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod

from harness.memory import DTYPE_BYTES
from harness.profile import LayerProfile, ModelProfile, Product


@dataclass(frozen=True)
class Matmul:
    """A product with a weight, of one micro-batch. `samples`, `inputs` and `outputs` are what p0, p2 and p1 divide.

    The tensors that are sent have `input_elements` and `output_elements`: a convolution (`conv`) is sent its images. A
    `look_up` has integers for inputs. Of what is `whole` only the rows are split, and what is sent is what enters or
    leaves its layer. Of `tied` ones the weight is one parameter.
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
        """Equal for products that differ in their names only."""
        return replace(self, name="")


@dataclass(frozen=True)
class Attention:
    """Between two products: every head and every sample by itself."""

    samples: int
    heads: int
    input_elements: int


@dataclass(frozen=True)
class Residual:
    """What comes out of `items` is added to what went in: both lie alike."""

    items: tuple[Matmul | Attention, ...]
    elements: int


Item = Matmul | Attention | Residual


@dataclass(frozen=True)
class Chain:
    """The products of a model for a micro-batch, `element_bytes` each element that is sent."""

    items: tuple[Item, ...]
    element_bytes: int

    @property
    def matmuls(self) -> list[Matmul]:
        return [item for item in self._inner() if isinstance(item, Matmul)]

    @property
    def attentions(self) -> list[Attention]:
        return [item for item in self._inner() if isinstance(item, Attention)]

    def _inner(self) -> Iterator[Item]:
        """Items, those of branches one by one."""
        for item in self.items:
            yield from item.items if isinstance(item, Residual) else (item,)


def chain_of(profile: ModelProfile) -> Chain:
    """The chain of a profile. Of layers with several products, those are kept whole that have others than linear ones
    in submodules and attention; so is all of a model with skips: its layers are no chain.

    A layer's products in one submodule ("attention.qkv", "attention.projection") are a residual branch if as many
    features leave it as enter it. Raises ValueError for a model without products.
    """
    width = DTYPE_BYTES[profile.autocast or profile.dtype]
    items = [item for number in range(len(profile.layers)) for item in _of_layer(profile, number, width)]
    if not items:
        raise ValueError(f"the profile of {profile.model or 'the model'} has no matrix products to split")
    return Chain(tuple(items), width)


def _of_layer(profile: ModelProfile, number: int, width: int) -> list[Item]:
    layer = profile.layers[number]
    weights = [product for product in layer.products if product.weight_bytes]
    if len(weights) == 1 and not profile.skips:
        return [_single(profile, number, weights[0], width)]
    if profile.skips or not all(_in_row(product) for product in layer.products):
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


def _in_row(product: Product) -> bool:
    """Whether it stands in a row with those of the same submodule; without one it may stand beside others."""
    alone = product.heads == 1 and bool(_submodule(product))
    return product.kind == "attention" or (product.kind == "linear" and alone)


def _submodule(product: Product) -> str:
    return product.name.rpartition(".")[0]


def _merged(layer: LayerProfile, samples: int) -> list[tuple[str, Matmul | Attention]]:
    """The items with their submodules; the products of one attention are one item, of the product before them."""
    found: list[tuple[str, Matmul | Attention]] = []
    for product in layer.products:
        before = found[-1] if found else None
        if product.weight_bytes:
            found.append((_submodule(product), _linear(layer, product, samples)))
        elif before and isinstance(before[1], Matmul):
            found.append((before[0], Attention(samples, product.heads, before[1].output_elements)))
    return found


def _prefix(item: tuple[str, Matmul | Attention]) -> str:
    return item[0]


def _linear(layer: LayerProfile, product: Product, samples: int) -> Matmul:
    elements = _input_elements(product, samples), _output_elements(product, samples)
    return Matmul(name_of(layer, product), samples, product.in_, product.out, *elements, product.weight_bytes)


def _single(profile: ModelProfile, number: int, product: Product, width: int) -> Matmul:
    """The only product of a layer: what enters and leaves it is what enters and leaves the layer."""
    layer = profile.layers[number]
    found = _linear(layer, product, profile.micro_batch)
    if product.kind == "conv" and _split(profile, number, product):
        found = replace(found, inputs=product.image[0], conv=True)
    elif product.kind not in ("linear", "embedding") or product.heads > 1:
        (found,) = _whole(profile, number, [product], width)
    tied = next((tied.name for tied in layer.tied if tied.bytes == product.weight_bytes), "")
    return replace(found, look_up=product.kind == "embedding", tied=tied)


def _split(profile: ModelProfile, number: int, product: Product) -> bool:
    """Whether channels of a convolution can be split: those of planes, without groups. Its layer takes and makes as
    many numbers as it does itself, or else it does more than work on each element."""
    if len(product.image) != 3 or product.heads > 1:
        return False
    taken, made = (elements(product, profile.micro_batch) for elements in (_input_elements, _output_elements))
    entering, leaving = profile.boundary_bytes(number), profile.layers[number].output_bytes
    widths = DTYPE_BYTES[profile.dtype], DTYPE_BYTES[profile.autocast or profile.dtype]
    return entering in (taken * width for width in widths) and leaving in (made * width for width in widths)


def _whole(profile: ModelProfile, number: int, products: list[Product], width: int) -> list[Matmul]:
    """What enters the layer is moved for the first of them, what leaves it for the last."""
    layer, samples = profile.layers[number], profile.micro_batch
    found = [
        Matmul(
            name_of(layer, product), samples, product.image[0] if product.image else product.in_ * product.heads,
            product.out * product.heads, _input_elements(product, samples), _output_elements(product, samples),
            product.weight_bytes, whole=True,
        )
        for product in products
    ]  # fmt: skip
    if found:
        found[0] = replace(found[0], input_elements=profile.boundary_bytes(number) // width)
        found[-1] = replace(found[-1], output_elements=layer.output_bytes // width)
    return found


def _input_elements(product: Product, samples: int) -> int:
    """Of what a product takes: images, integers to look up, or rows."""
    if product.image:
        return samples * prod(product.image)
    columns = 1 if product.kind == "embedding" else product.in_ * product.heads
    return samples * product.rows_per_sample * columns


def _output_elements(product: Product, samples: int) -> int:
    return samples * product.rows_per_sample * product.out * product.heads


def name_of(layer: LayerProfile, product: Product) -> str:
    """The module whose weight it is."""
    own = product.name in (layer.name, product.kind, "")
    return layer.name if own else f"{layer.name}.{product.name}"
