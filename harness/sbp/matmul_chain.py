"""The chain of matmuls of a model, from its profile: what tensor parallelism splits layer by layer.

    embedding -> [ + qkv -> attention -> projection ] -> [ + up -> down ] -> ... -> head

Everything between two matmuls works on each element by itself, on whatever block a device has. Profiles say so for each
layer (`harness.core.products.Read`); what does something else is kept whole. Matmuls that read the same tensor, as
gate and up of a gated linear unit, are one whose columns are split part by part: the product of two parts is split as
they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from math import gcd, prod
from typing import NamedTuple

from harness.core.memory_model import DTYPE_BYTES
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.products import INPUT, Product, Read


@dataclass(frozen=True)
class Matmul:
    """A matmul with a weight, of one micro-batch. p0, p2 and p1 divide `samples`, `inputs` and `outputs`.

    The tensors that are sent have `input_elements` and `output_elements`: for a convolution (`conv`) those of its
    images. A `look_up` has integers for inputs. A `whole` matmul is split by rows only, and what is sent is the input
    or output of its layer. Matmuls with the same `tied` share one parameter. Several that read the same tensor are one,
    with the `outputs` of all, those of each in `parts`, and a name such as "mlp.gate+up". A `frozen` weight has no
    gradient; a `cut` one's input needs none, since nothing before it is trained.
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
    parts: tuple[int, ...] = ()
    frozen: bool = False
    cut: bool = False

    @property
    def divided(self) -> int:
        """What the number of devices that split the outputs must divide: all outputs, or those of each part."""
        return gcd(*self.parts) if self.parts else self.outputs

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each part in outputs and weights: each is a message of its own."""
        return tuple(part / self.outputs for part in self.parts) or (1.0,)

    @cached_property
    def nameless(self) -> Matmul:
        """Equal for matmuls that differ in their names only."""
        return replace(self, name="")


@dataclass(frozen=True)
class Attention:
    """Attention between two matmuls: every head and every sample is independent. A `cut` one has no gradient."""

    samples: int
    heads: int
    input_elements: int
    cut: bool = False


@dataclass(frozen=True)
class Residual:
    """A branch whose output is added to its input: both have the same layout."""

    items: tuple[Matmul | Attention, ...]
    elements: int


Inner = Matmul | Attention
Item = Inner | Residual


class OneWay(int):
    """The elements of a tensor without a gradient: it is moved in forward passes alone."""


def one_way(elements: int, cut: bool) -> int:
    """Returns the elements of a tensor that enters an item, which say whether it gets a gradient."""
    return OneWay(elements) if cut else elements


def is_cut(item: Item) -> bool:
    """Returns whether the gradient of what enters an item is not needed."""
    return is_cut(item.items[0]) if isinstance(item, Residual) else item.cut


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


_KNOWN: deque[tuple[ModelProfile, Chain]] = deque(maxlen=16)
"""Chains of the last profiles, the same objects: a search asks for them again and again."""


def chain_from_profile(profile: ModelProfile) -> Chain:
    """Returns the chain of a profile.

    A layer with several matmuls is kept whole unless all are attention or linear layers in submodules, each used once,
    each of which reads what the one before gives, column by column. A model with skips is kept whole, too, since its
    layers are not a chain, and so is one with a layer that mixes columns without a matmul, as a softmax does.

    A layer's matmuls in one submodule ("attention.qkv", "attention.projection") are a residual branch if what enters
    them is added to what leaves them. Raises ValueError for a model without matmuls.
    """
    for known, chain in _KNOWN:
        if known is profile:
            return chain
    chain = _chain(profile)
    _KNOWN.append((profile, chain))
    return chain


def _chain(profile: ModelProfile) -> Chain:
    width = DTYPE_BYTES[profile.autocast or profile.dtype]
    in_a_row = not profile.skips and not any(map(_mixes, profile.layers))
    items: list[Item] = []
    for number in range(len(profile.layers)):
        own = _layer_items(profile, number, width, in_a_row)
        items += _cut(own) if number <= profile.frozen_prefix and profile.frozen_prefix else own
    if not items:
        raise ValueError(f"the profile of {profile.model or 'the model'} has no matmuls to split")
    return Chain(tuple(items), width)


def _cut(items: Sequence[Item]) -> list[Item]:
    """Returns the items of a layer that no gradient enters: those up to the first one that is trained are cut."""
    found: list[Item] = []
    trained = False
    for item in items:
        inner = item.items if isinstance(item, Residual) else (item,)
        cut: list[Inner] = []
        for one in inner:
            cut.append(one if trained else replace(one, cut=True))
            trained = trained or (isinstance(one, Matmul) and not one.frozen)
        found.append(replace(item, items=tuple(cut)) if isinstance(item, Residual) else cut[0])
    return found


def _layer_items(profile: ModelProfile, number: int, width: int, in_a_row: bool) -> list[Item]:
    layer = profile.layers[number]
    weights = [product for product in layer.products if product.weight_bytes]
    if not in_a_row:
        return [*_whole(profile, number, weights, width)]
    if len(weights) < 2:
        return [_single(profile, number, product, width) for product in weights]
    once = len({product.name for product in weights}) == len(weights)
    row = once and all(map(_is_sequential, layer.products)) and (bool(layer.reads) or _attends_at_once(layer))
    items = _in_a_row(layer, profile.micro_batch) if row else None
    return [*_whole(profile, number, weights, width)] if items is None else items


def _attends_at_once(layer: LayerProfile) -> bool:
    """Returns whether the matmul before each attention has queries, keys and values of all its heads. One that has a
    part of them is not alone: the others read the same tensor as it does."""
    pairs = pairwise(layer.products)
    return all(
        before.out == 3 * scores.heads * scores.in_
        for before, scores in pairs
        if scores.kind == "attention" and before.weight_bytes
    )


def _mixes(layer: LayerProfile) -> bool:
    """Returns whether a layer without matmuls gives other columns than those that enter it."""
    weights = any(product.weight_bytes for product in layer.products)
    return not weights and bool(layer.reads) and layer.reads[-1].sources != (INPUT,)


def _in_a_row(layer: LayerProfile, samples: int) -> list[Item] | None:
    """Returns branches and what is between them; None if it is not known that each matmul reads the one before."""
    items: list[Item] = []
    stream: tuple[int, ...] = (INPUT,)
    merged = _merged(layer, samples)
    branches = [list(group) for _, group in groupby(merged, key=lambda read: read.submodule)]
    leaves = layer.reads[-1].sources if layer.reads else ()
    ends = [*(branch[0].read.sources for branch in branches[1:]), leaves]
    for branch, after in zip(branches, ends, strict=True):
        found = [read.item for read in branch]
        matmuls = [item for item in found if isinstance(item, Matmul)]
        last = max(branch, key=lambda read: read.products).products
        added = tuple(sorted({*stream, *last}))
        if layer.reads and not (_follows(branch, stream) and not matmuls[-1].parts and after in (added, last)):
            return None
        if after == added if layer.reads else matmuls[0].inputs == matmuls[-1].outputs:
            items.append(Residual(tuple(found), matmuls[0].input_elements))
            stream = added
        else:
            items += found
            stream = last
    return items


def _follows(branch: Sequence[_Read], stream: tuple[int, ...]) -> bool:
    """Returns whether the first matmul reads the stream, and each other one what is before it."""
    before = stream
    for read in branch:
        attention = isinstance(read.item, Attention)
        if read.read.sources != before or (attention and not read.read.heads):
            return False
        before = before if attention else read.products
    return True


def _is_sequential(product: Product) -> bool:
    """Returns whether it follows those of the same submodule; without a submodule it may be parallel to others."""
    alone = product.heads == 1 and bool(_submodule(product))
    return product.kind == "attention" or (product.kind == "linear" and alone)


def _submodule(product: Product) -> str:
    return product.name.rpartition(".")[0]


class _Read(NamedTuple):
    """An item of a layer, the products that it is, by index, what it reads, and its submodule."""

    item: Matmul | Attention
    products: tuple[int, ...]
    read: Read
    submodule: str


def _merged(layer: LayerProfile, samples: int) -> list[_Read]:
    """Returns the items of a layer. The matmuls of one attention are one item, in the submodule of the matmul before;
    so are neighbours in a submodule that read the same tensor."""
    items: list[_Read] = []
    for number, product in enumerate(layer.products):
        read, previous = layer.reads[number] if layer.reads else Read(), items[-1] if items else None
        if product.weight_bytes:
            new = _Read(_linear(layer, product, samples), (number,), read, _submodule(product))
            together = previous and _read_together(previous, new)
            items[len(items) - 1 if together else len(items) :] = [
                _joined(previous, new) if previous and together else new
            ]
        elif previous:
            heads = read.heads if layer.reads else product.heads
            if isinstance(previous.item, Matmul):
                item = Attention(samples, heads, previous.item.output_elements)
                items.append(_Read(item, (number,), read, previous.submodule))
            elif layer.reads:
                items[-1] = previous._replace(item=replace(previous.item, heads=heads), read=read)
    return items


def _read_together(one: _Read, other: _Read) -> bool:
    """Returns whether two are matmuls that read the same tensor, and both are trained, or both are not."""
    same = bool(one.read.sources) and one.read == other.read and one.submodule == other.submodule
    both = isinstance(one.item, Matmul) and isinstance(other.item, Matmul) and one.item.frozen == other.item.frozen
    return same and both


def _joined(one: _Read, other: _Read) -> _Read:
    """Returns the matmul with the columns of both."""
    first, second = one.item, other.item
    assert isinstance(first, Matmul) and isinstance(second, Matmul)
    item = replace(
        first,
        name=f"{first.name}+{second.name.rpartition('.')[2]}",
        outputs=first.outputs + second.outputs,
        output_elements=first.output_elements + second.output_elements,
        weight_bytes=first.weight_bytes + second.weight_bytes,
        parts=(*(first.parts or (first.outputs,)), second.outputs),
    )
    return one._replace(item=item, products=one.products + other.products)


def part_names(name: str) -> list[str]:
    """Returns the names of the modules of a matmul: mlp.gate and mlp.up of "mlp.gate+up"."""
    submodule, dot, parts = name.rpartition(".")
    return [f"{submodule}{dot}{part}" for part in parts.split("+")]


def _linear(layer: LayerProfile, product: Product, samples: int) -> Matmul:
    elements = _input_elements(product, samples), _output_elements(product, samples)
    name, frozen = matmul_name(layer, product), product.frozen
    return Matmul(name, samples, product.in_, product.out, *elements, product.weight_bytes, frozen=frozen)


def _single(profile: ModelProfile, number: int, product: Product, width: int) -> Matmul:
    """Returns the only matmul of a layer: its input and output are those of the layer."""
    layer = profile.layers[number]
    matmul = _linear(layer, product, profile.micro_batch)
    if product.kind == "conv" and _split(profile, number, product):
        matmul = replace(matmul, inputs=product.image[0], conv=True)
    elif product.kind not in ("linear", "embedding") or product.heads > 1 or not _alone(layer, product):
        (matmul,) = _whole(profile, number, [product], width)
    tied = next((tied.name for tied in layer.tied if tied.bytes == product.weight_bytes), "")
    return replace(matmul, look_up=product.kind == "embedding", tied=tied)


def _alone(layer: LayerProfile, product: Product) -> bool:
    """Returns whether the only matmul of a layer reads the columns of the layer's input, if it has any, and the layer
    gives those of the matmul."""
    if not layer.reads:
        return True
    reads = [INPUT] if product.kind == "linear" else []
    number = layer.products.index(product)
    return list(layer.reads[number].sources) == reads and layer.reads[-1].sources == (number,) and number == 0


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
    """Returns matmuls that are kept whole, one for each weight: the layer's input is moved for the first of them, its
    output for the last."""
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
            frozen=product.frozen,
        )
        for product in dict.fromkeys(products)
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
    """Returns the name of the module that has the weight. A layer's only one has the layer's name; stored profiles may
    call it by its kind."""
    only = sum(bool(one.weight_bytes) for one in layer.products) < 2 and product.name in (layer.name, product.kind)
    return layer.name if only or not product.name else f"{layer.name}.{product.name}"
