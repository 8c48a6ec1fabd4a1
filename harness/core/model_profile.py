"""The profile of a model: time, work and bytes of each layer for ONE micro-batch, the input of planners and
simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from harness.core.cluster import Device, Held
from harness.core.products import Product, Read
from harness.core.serialization import Document
from harness.core.traits import Given, Traits

BACKWARD = 2.0
"""The work of a layer's backward pass, in forward passes: gradients of its input and of its parameters."""


@dataclass(frozen=True)
class Tied:
    """A parameter that a layer shares with another one: its first name in the whole model, as "embedding.weight".
    `frozen`: it is not trained."""

    name: str
    bytes: int
    frozen: bool = False

    def __post_init__(self) -> None:
        _check(f"bytes of the tied {self.name!r}", self.bytes)


@dataclass(frozen=True)
class SharedBuffer:
    """A buffer that a layer shares with another one: its first name in the whole model, as "0.rotary.cosines".

    `written`: a forward pass changes it, so that copies on several devices would not stay equal. Other state that
    layers share is listed where a forward pass changes it, a plain attribute for example, with 0 bytes.
    """

    name: str
    bytes: int
    written: bool = False

    def __post_init__(self) -> None:
        _check(f"bytes of the shared buffer {self.name!r}", self.bytes)


@dataclass(frozen=True)
class LayerProfile:
    """Time, work and bytes of one layer for one micro-batch.

    `flops`, `bytes_moved` (read and written by all kernels), `elementwise_bytes` (the part of it by kernels without
    FLOPs) and `kernels` are those of the forward pass (`harness.measure.kernel_counter`). `output_bytes` is what
    leaves the layer, `saved_bytes` what autograd keeps for the backward pass (without parameters, and without what an
    earlier layer keeps already: see `harness.measure.count_model`). `working_bytes` is what its backward pass needs at
    once beyond that, and beyond the gradients of what leaves and enters it. `recomputed_flops` are those of the
    forward pass that its backward pass repeats. `param_bytes` are those of all the layer's parameters, `weights` is
    their number, `norms` that of its batch norms, which read `norm_bytes` (all 0 in older profiles); `frozen_bytes` and
    `frozen_weights` are those of parameters that are not trained (`requires_grad=False`). `tied` lists parameters that
    other layers share; so do `buffer_bytes` and `shared_buffers`. The FLOPs of `products` add up to `flops`
    (`harness.measure.matmul_finder`). `reads` has what each of them reads, then what the layer's output shows
    (`harness.measure.column_flow`); () where nobody knows: an older profile, images, several tensors. `input_share` is
    the part of a backward pass for the gradients of the inputs, where passes come in halves. `backward_matmuls` and
    `backward_others` are the work of the backward pass in forward passes, of kernels with FLOPs and of all others: 2,
    gradients of inputs and of weights, and less where the model has parameters that are not trained. `forward_fixed`
    and `backward_fixed` are the parts of a pass that fewer samples take, too (`shared_by`). By `backward_bytes` memory
    grows in the backward pass, workspaces of kernels included, as measured; 0: not known.
    """

    name: str = ""
    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: float = 0.0
    bytes_moved: float = 0.0
    elementwise_bytes: float = 0.0
    kernels: int = 1
    param_bytes: int = 0
    weights: int = 0
    frozen_bytes: int = 0
    frozen_weights: int = 0
    norms: int = 0
    norm_bytes: int = 0
    buffer_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    working_bytes: int = 0
    backward_bytes: int = 0
    recomputed_flops: float = 0.0
    input_share: float = 0.5
    forward_fixed: float = 0.0
    backward_fixed: float = 0.0
    backward_matmuls: float = BACKWARD
    backward_others: float = BACKWARD
    tied: tuple[Tied, ...] = ()
    shared_buffers: tuple[SharedBuffer, ...] = ()
    products: tuple[Product, ...] = ()
    reads: tuple[Read, ...] = ()
    traits: Traits = field(default_factory=Traits)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, (int, float)):
                _check(f"{one.name} of layer {self.name!r}", value, LARGEST_OF.get(one.name, LARGEST))
        if not (self.frozen_bytes <= self.param_bytes and self.frozen_weights <= self.weights):
            raise ValueError(
                f"frozen_bytes of layer {self.name!r} are {self.frozen_bytes} (of {self.frozen_weights} weights), its "
                f"param_bytes are {self.param_bytes} (of {self.weights} weights)"
            )
        self._check_shared("tied", "param_bytes")
        self._check_shared("shared_buffers", "buffer_bytes")

    def shared_by(self, devices: int, elsewhere: int = 0) -> tuple[float, float]:
        """Returns the seconds of both passes on each of so many devices that share the work. Each takes the fixed part
        whole, but for reading weights, of which `elsewhere` bytes are on other devices."""
        read = 1 - elsewhere / max(1, self.bytes_moved, self.param_bytes)
        parts = (self.forward_s, self.forward_fixed), (self.backward_s, self.backward_fixed)
        forward_s, backward_s = (seconds * (fixed * read + (1 - fixed) / devices) for seconds, fixed in parts)
        return forward_s, backward_s

    @property
    def new_gradient_bytes(self) -> int:
        """Bytes of the largest new gradient, which is added to the one before. Without weights of matmuls: of all."""
        return max((one.weight_bytes for one in self.products if not one.frozen), default=0) or self.trained_bytes

    def backward_of(self, share: float, weights: float = 1.0) -> int:
        """Returns `backward_bytes` of a share of the activations, and one of the weights."""
        new = min(self.new_gradient_bytes, self.backward_bytes)
        return round(new * weights + (self.backward_bytes - new) * share)

    def _check_shared(self, field: str, whole: str) -> None:
        shared: tuple[Tied | SharedBuffer, ...] = getattr(self, field)
        names, held = {one.name for one in shared}, getattr(self, whole)
        if len(names) < len(shared):
            raise ValueError(f"{field} of layer {self.name!r} has {len(shared)} names, {len(names)} of them different")
        if not sum(one.bytes for one in shared) <= held:
            raise ValueError(
                f"{field} of layer {self.name!r} is {sum(one.bytes for one in shared)} bytes, its {whole} are {held}"
            )

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that are trained, which have gradients and the state of an optimizer."""
        return self.param_bytes - self.frozen_bytes

    @property
    def backward_flops(self) -> float:
        """The FLOPs of the backward pass, without what it recomputes."""
        return self.backward_matmuls * self.flops


NUMBERS = Given("float32", gradient=True)
"""What nearly all layers hand over."""


@dataclass(frozen=True)
class Skip:
    """A long edge: the tensor that layer `source` stashes and layer `target` pops (0-based layer indices)."""

    source: int
    target: int
    bytes: int
    name: str = ""
    tensor: Given = NUMBERS

    def __post_init__(self) -> None:
        _check(f"bytes of skip {self.name or '?'} from layer {self.source} to {self.target}", self.bytes)


@dataclass(frozen=True)
class Unsplit:
    """Why a module is one layer: what `code`, in a line of a file, does."""

    file: str
    line: int
    code: str
    reason: str

    @property
    def text(self) -> str:
        """As a message says it: "net.py:12, `if x.sum() > 0:`: it reads ..."."""
        return f"{self.file}:{self.line}, `{self.code}`: {self.reason}"


LayerTimes = Literal["measured", "scaled", "analytic", "none", "as given"]
"""Measured; measured and scaled to another device; computed from counted work; layers take no time; unknown to us."""
FORMER_TIMES: dict[str, LayerTimes] = {
    "measured": "measured", "scaled": "scaled", "analytic": "analytic", "none": "none", "counted": "none",
}  # fmt: skip


@dataclass(frozen=True)
class ModelProfile(Document):
    """A whole model's profile.

    `times` says where the layer times come from, `source` says it of all numbers, for people; `device` is the one whose
    times they are, where its peaks are known. Matmuls compute in the format `autocast` where it is given, else in
    `dtype`. `slowed` is by how much other programs slowed down what was measured
    (`harness.measure.profile_model`): 1 where they did not. `lock_share` is the share by which each further thread of
    one Python that computes at the same time makes layers longer (`harness.measure.work_together`). `unsplit` says why
    the model is one layer, if it is one because it cannot be split (`harness.capture`). `same_memory` are pairs of a
    weight and of another tensor that shows its memory, too, by their names. `by_value` says where values of tensors
    choose what is computed, if they do.
    """

    SCHEMA: ClassVar[int] = 2

    layers: tuple[LayerProfile, ...]
    model: str = ""
    micro_batch: int = 1
    dtype: str = "float32"
    input_bytes: int = 0
    skips: tuple[Skip, ...] = ()
    source: str = "unknown"
    autocast: str | None = None
    device: Device | None = None
    slowed: float = 1.0
    lock_share: float = 0.0
    times: LayerTimes = "as given"
    unsplit: Unsplit | None = None
    same_memory: tuple[tuple[str, str], ...] = ()
    by_value: str = ""

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """A file of before `times` existed says it by the first word of its `source`: "measured on A"."""
        if isinstance(data, dict) and "times" not in data:
            word = str(data.get("source", "")).partition(" ")[0].rstrip(",")
            data = {**data, "times": FORMER_TIMES.get(word, "as given")}
        return super().from_json(data)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a profile needs at least one layer, this one has 0")
        if self.micro_batch < 1:
            raise ValueError(f"micro_batch is {self.micro_batch}, must be at least 1")
        _check("input_bytes", self.input_bytes)
        _check("slowed", self.slowed)
        _check("lock_share", self.lock_share)
        for skip in self.skips:
            if not 0 <= skip.source < skip.target < len(self.layers):
                raise ValueError(
                    f"skip {skip.name or '?'} goes from layer {skip.source} to {skip.target}: "
                    f"it must go forward within the {len(self.layers)} layers"
                )
        object.__setattr__(self, "skips", _named(self.skips))

    def for_samples(self, samples: int) -> ModelProfile:
        """Returns the profile of micro-batches of `samples`: activations and times scale, parameters do not."""
        own_samples = self.micro_batch
        if samples == own_samples:
            return self
        layers = tuple(
            replace(
                layer,
                forward_s=layer.forward_s * samples / own_samples,
                backward_s=layer.backward_s * samples / own_samples,
                output_bytes=layer.output_bytes * samples // own_samples,
                saved_bytes=layer.saved_bytes * samples // own_samples,
                working_bytes=layer.working_bytes * samples // own_samples,
                backward_bytes=layer.backward_of(samples / own_samples),
            )
            for layer in self.layers
        )
        skips = tuple(replace(skip, bytes=skip.bytes * samples // own_samples) for skip in self.skips)
        return replace(
            self, layers=layers, skips=skips, micro_batch=samples, input_bytes=self.input_bytes * samples // own_samples
        )

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The index of each layer by its name; of equal names the first one."""
        return {layer.name: number for number, layer in reversed([*enumerate(self.layers)])}

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest output of a layer, or of all parameters of one, whichever is more."""
        return max(max(layer.output_bytes, layer.param_bytes) for layer in self.layers)

    @property
    def first_trained(self) -> int:
        """The first layer with parameters that are trained; those before it need no backward pass. 0 without any."""
        return next((n for n, p in enumerate(self.layers) if p.trained_bytes or p.weights > p.frozen_weights), 0)

    @cached_property
    def frozen_prefix(self) -> int:
        """How many layers come before all that are trained, if any of them has weights: no gradient reaches them."""
        before = self.layers[: self.first_trained]
        return len(before) if any(layer.frozen_weights or layer.frozen_bytes for layer in before) else 0

    def needed_gradient(self, skip: Skip) -> bool:
        """Returns whether the tensor of a skip gets a gradient."""
        return skip.source >= self.frozen_prefix

    def boundary_bytes(self, layer: int) -> int:
        """Returns the bytes of one micro-batch that enter `layer` from the layer before it (the input for layer 0)."""
        return self.input_bytes if layer == 0 else self.layers[layer - 1].output_bytes

    def crossing_bytes(self, boundary: int) -> int:
        """Returns the bytes of one micro-batch that cross the cut before layer `boundary`: what enters it, and skips
        over it."""
        return self.boundary_bytes(boundary) + sum(s.bytes for s in self.skips if s.source < boundary <= s.target)

    def without_input_gradients(self, last: int) -> ModelProfile:
        """Returns the profile whose layers up to `last` compute no gradients of inputs: nobody needs those of the
        model's own inputs."""
        own = tuple(replace(layer, input_share=0.0) for layer in self.layers[: last + 1])
        return replace(self, layers=(*own, *self.layers[last + 1 :]))

    def sum(self, field: str, first: int, last: int) -> float:
        """Returns the sum of one numeric field over the layers `first`..`last`, both included."""
        return math.fsum(getattr(layer, field) for layer in self.layers[first : last + 1])

    def parameter_bytes(self, first: int = 0, last: int | None = None) -> int:
        """Returns the bytes of the parameters of the layers `first`..`last` (default: all); tied weights count once."""
        return self.parameter_bytes_of(range(first, len(self.layers) if last is None else last + 1))

    def parameter_bytes_of(self, layers: Iterable[int]) -> int:
        """Returns the bytes of the parameters of these layers, by index; tied weights count once."""
        held = [self.layers[number] for number in layers]
        return sum(layer.param_bytes for layer in held) - _repeated(one for layer in held for one in layer.tied)

    def trained_bytes(self, first: int = 0, last: int | None = None) -> int:
        """Returns the bytes of the trained parameters of the layers `first`..`last`; tied weights count once."""
        return self.trained_bytes_of(range(first, len(self.layers) if last is None else last + 1))

    def trained_bytes_of(self, layers: Iterable[int]) -> int:
        """Returns the bytes of the parameters of these layers, by index, that are trained; tied weights count once."""
        held = [self.layers[number] for number in layers]
        repeated = _repeated(one for layer in held for one in layer.tied if not one.frozen)
        return sum(layer.trained_bytes for layer in held) - repeated

    def largest_parameter(self, first: int, last: int) -> int:
        """Returns the largest `new_gradient_bytes` of the layers `first`..`last`."""
        return max(layer.new_gradient_bytes for layer in self.layers[first : last + 1])

    def held(self, first: int, last: int, trained: bool = False) -> Held:
        """Returns what the layers `first`..`last` hold, or of it what is `trained`; tied weights' bytes count once."""
        layers = self.layers[first : last + 1]
        norms, norm_bytes = sum(one.norms for one in layers), sum(one.norm_bytes for one in layers)
        if trained:
            weights = sum(one.weights - one.frozen_weights for one in layers)
            count = sum(bool(one.trained_bytes) for one in layers)
            return Held(count, weights, self.trained_bytes(first, last), norms, norm_bytes)
        count, weights = sum(bool(one.param_bytes) for one in layers), sum(one.weights for one in layers)
        return Held(count, weights, self.parameter_bytes(first, last), norms, norm_bytes)

    def buffer_bytes_of(self, layers: Iterable[int]) -> int:
        """Returns the bytes of the buffers of these layers, by index; one that several share counts once."""
        held = [self.layers[number] for number in layers]
        repeated = _repeated(one for layer in held for one in layer.shared_buffers)
        return sum(layer.buffer_bytes for layer in held) - repeated

    def skips_into(self, first: int, last: int) -> list[Skip]:
        """Returns skips popped inside `first`..`last` and stashed before it."""
        return [s for s in self.skips if s.source < first <= s.target <= last]

    def skips_out_of(self, first: int, last: int) -> list[Skip]:
        """Returns skips stashed inside `first`..`last` and popped after it."""
        return [s for s in self.skips if first <= s.source <= last < s.target]

    def skips_over(self, first: int, last: int) -> list[Skip]:
        """Returns skips that pass over `first`..`last` altogether."""
        return [s for s in self.skips if s.source < first and s.target > last]


LARGEST = 10**15
"""Largest bytes (a petabyte); a larger value is a mistake, and would overflow sums."""
LARGEST_OF = {"flops": 1e21, "recomputed_flops": 1e21}
LARGEST_OF |= dict.fromkeys(("input_share", "forward_fixed", "backward_fixed"), 1.0)
"""Largest values of other fields of a layer."""


def _check(what: str, value: float, largest: float = LARGEST) -> None:
    if not (math.isfinite(value) and 0 <= value <= largest):
        raise ValueError(f"{what} is {value}, must be a number of at least 0 and at most {largest:g}")


def _repeated(shared: Iterable[Tied | SharedBuffer]) -> int:
    """Returns the bytes of what comes again among these."""
    listed = list(shared)
    return sum(one.bytes for one in listed) - sum({one.name: one.bytes for one in listed}.values())


def _named(skips: tuple[Skip, ...]) -> tuple[Skip, ...]:
    """Returns skips with unique names; one without is named after its layers. Raises ValueError for a name twice."""
    named: list[Skip] = []
    taken = {skip.name for skip in skips if skip.name}
    for skip in skips:
        name, count = skip.name or f"skip_{skip.source}_{skip.target}", 1
        while not skip.name and name in taken:
            count += 1
            name = f"skip_{skip.source}_{skip.target}_{count}"
        if any(other.name == name for other in named):
            raise ValueError(f"two skips are called {name}, each needs a name of its own")
        taken.add(name)
        named.append(replace(skip, name=name))
    return tuple(named)
