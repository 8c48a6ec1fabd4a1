"""What of a model is split layer by layer: its matrix products in a row, as a profile tells of them.

    embedding -> [ + qkv -> attention -> projection ] -> [ + up -> down ] -> ... -> head

Everything between two products works on each element by itself, on whatever block a device has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from harness.memory import DTYPE_BYTES
from harness.profile import LayerProfile, ModelProfile, Product


@dataclass(frozen=True)
class Matmul:
    """A product with a weight, of one micro-batch. `samples`, `inputs` and `outputs` are what p0, p2 and p1 divide.

    The tensors that are sent have `input_elements` and `output_elements`: a convolution (`conv`) is sent its images. A
    `look_up` has integers for inputs. Of what is `whole` only the rows are split. Of `tied` ones the weight is one
    parameter.
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
    """The chain of a profile. Products of a layer that has others than linear ones and attention are kept whole, and
    those of a model with skips: its layers are no chain.

    A layer's products in one submodule ("attention.qkv", "attention.projection") are a residual branch if as many
    features leave it as enter it. Raises ValueError for a model without products.
    """
    width = DTYPE_BYTES[profile.autocast or profile.dtype]
    items = [item for number in range(len(profile.layers)) for item in _of_layer(profile, number, width)]
    if not items:
        raise ValueError(f"the profile of {profile.model or 'the model'} has no matrix products to split")
    return Chain(tuple(items), width)


def _of_layer(profile: ModelProfile, number: int, width: int) -> list[Item]:
    layer, samples = profile.layers[number], profile.micro_batch
    weights = [product for product in layer.products if product.weight_bytes]
    if profile.skips:
        return [_whole(layer, product, samples) for product in weights]
    if len(weights) == 1:
        return [_single(profile, number, weights[0])]
    if any(product.kind not in ("linear", "attention") or (product.heads > 1 and product.weight_bytes)
           for product in layer.products):  # fmt: skip
        return [_whole(layer, product, samples) for product in weights]
    items: list[Item] = []
    for prefix, group in groupby(_merged(layer, samples), key=_prefix):
        branch = [item for _, item in group]
        matmuls = [item for item in branch if isinstance(item, Matmul)]
        if not prefix:  # they may stand beside each other
            items += [replace(item, whole=True) for item in matmuls]
        elif matmuls[0].inputs == matmuls[-1].outputs:
            items.append(Residual(tuple(branch), matmuls[0].input_elements))
        else:
            items += branch
    return items


def _merged(layer: LayerProfile, samples: int) -> list[tuple[str, Matmul | Attention]]:
    """The items with their submodules; the products of one attention are one item, of the product before them."""
    found: list[tuple[str, Matmul | Attention]] = []
    for product in layer.products:
        before = found[-1] if found else None
        if product.weight_bytes:
            found.append((product.name.rpartition(".")[0], _linear(layer, product, samples)))
        elif before and isinstance(before[1], Matmul):
            found.append((before[0], Attention(samples, product.heads, before[1].output_elements)))
    return found


def _prefix(item: tuple[str, Matmul | Attention]) -> str:
    return item[0]


def _linear(layer: LayerProfile, product: Product, samples: int) -> Matmul:
    rows = product.rows_per_sample * samples
    return Matmul(
        _name(layer, product), samples, product.in_, product.out, rows * product.in_, rows * product.out,
        product.weight_bytes,
    )  # fmt: skip


def _single(profile: ModelProfile, number: int, product: Product) -> Matmul:
    """The only product of a layer: what enters and leaves it is what enters and leaves the layer."""
    layer, samples = profile.layers[number], profile.micro_batch
    name, rows = _name(layer, product), product.rows_per_sample * samples
    tied = next((tied.name for tied in layer.tied if tied.bytes == product.weight_bytes), "")
    look_up = product.kind == "embedding"
    if product.kind != "conv":
        whole = product.heads > 1 or product.kind == "once"
        entering = rows if look_up else rows * product.in_
        return Matmul(name, samples, product.in_, product.out, entering, rows * product.out, product.weight_bytes,
                      look_up, whole, tied)  # fmt: skip
    width = DTYPE_BYTES[profile.dtype]
    entering, leaving = profile.boundary_bytes(number) // width, layer.output_bytes // width
    kernel = max(1, product.in_ * rows // entering)  # as many places come in as go out
    whole = product.heads > 1 or product.in_ % kernel > 0 or leaving != rows * product.out
    return Matmul(name, samples, product.in_ // kernel, product.out, entering, leaving, product.weight_bytes,
                  whole=whole, tied=tied, conv=True)  # fmt: skip


def _whole(layer: LayerProfile, product: Product, samples: int) -> Matmul:
    rows = product.rows_per_sample * samples
    elements = rows * product.in_ * product.heads, rows * product.out * product.heads
    return Matmul(_name(layer, product), samples, product.in_, product.out, *elements, product.weight_bytes, whole=True)


def _name(layer: LayerProfile, product: Product) -> str:
    """The module whose weight it is."""
    own = product.name in (layer.name, product.kind, "")
    return layer.name if own else f"{layer.name}.{product.name}"
