"""What a model costs, layer by layer, for ONE micro-batch: what planners and the simulator know of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from harness.cluster import Device
from harness.serial import Document


@dataclass(frozen=True)
class Product:
    """One matrix product of a layer: `rows_per_sample` x `in_` times `in_` x `out`."""

    name: str
    kind: str = "linear"
    rows_per_sample: int = 1
    in_: int = 1
    out: int = 1
    weight_bytes: int = 0
    heads: int = 1


@dataclass(frozen=True)
class LayerProfile:
    """Time, work and bytes of one layer for one micro-batch.

    `flops`, `bytes_moved` (read and written by all kernels), `elementwise_bytes` (the part of it by kernels without
    FLOPs) and `kernels` are those of the forward pass (`harness.work`). `output_bytes` is what leaves the layer,
    `saved_bytes` what autograd keeps for the backward pass (without parameters, and without what an earlier layer
    keeps already: see `harness.counting`).
    """

    name: str = ""
    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: float = 0.0
    bytes_moved: float = 0.0
    elementwise_bytes: float = 0.0
    kernels: int = 1
    param_bytes: int = 0
    buffer_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    tied: str | None = None
    products: tuple[Product, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)):
                _check(f"{field.name} of layer {self.name!r}", value)


@dataclass(frozen=True)
class Skip:
    """A long edge: the tensor that layer `source` stashes and layer `target` pops (0-based layer indices)."""

    source: int
    target: int
    bytes: int
    name: str = ""

    def __post_init__(self) -> None:
        _check(f"bytes of skip {self.name or '?'} from layer {self.source} to {self.target}", self.bytes)


@dataclass(frozen=True)
class ModelProfile(Document):
    """A whole model's profile.

    `source` says where the numbers are from: "measured on ...", "counted on ..." (without times), "analytic on ..." or
    "scaled from ..."; `device` whose times they are, where its peaks are known. Matrix products compute in the format
    `autocast` where it is given, else in `dtype`.
    """

    layers: tuple[LayerProfile, ...]
    model: str = ""
    micro_batch: int = 1
    dtype: str = "float32"
    input_bytes: int = 0
    skips: tuple[Skip, ...] = ()
    source: str = "unknown"
    autocast: str | None = None
    device: Device | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a profile needs at least one layer, this one has 0")
        if self.micro_batch < 1:
            raise ValueError(f"micro_batch is {self.micro_batch}, must be at least 1")
        _check("input_bytes", self.input_bytes)
        for skip in self.skips:
            if not 0 <= skip.source < skip.target < len(self.layers):
                raise ValueError(
                    f"skip {skip.name or '?'} goes from layer {skip.source} to {skip.target}: "
                    f"it must go forward within the {len(self.layers)} layers"
                )
        object.__setattr__(self, "skips", _named(self.skips))

    def boundary_bytes(self, layer: int) -> int:
        """Bytes of one micro-batch that enter `layer` from the layer before it (the input for layer 0)."""
        return self.input_bytes if layer == 0 else self.layers[layer - 1].output_bytes

    def sum(self, field: str, first: int, last: int) -> float:
        """The sum of one numeric field over the layers `first`..`last`, both included."""
        return math.fsum(getattr(layer, field) for layer in self.layers[first : last + 1])

    def parameter_bytes(self, first: int, last: int) -> int:
        """Bytes of the parameters of the layers `first`..`last`; what tied layers share counts once."""
        owners: dict[str, int] = {}
        total = 0
        for layer in self.layers[first : last + 1]:
            total += layer.param_bytes
            if layer.tied is not None:
                total -= min(layer.param_bytes, owners.get(layer.tied, 0))
                owners.setdefault(layer.tied, layer.param_bytes)
        return total

    def skips_into(self, first: int, last: int) -> list[Skip]:
        """Skips popped inside `first`..`last` and stashed before it."""
        return [s for s in self.skips if s.source < first <= s.target <= last]

    def skips_out_of(self, first: int, last: int) -> list[Skip]:
        """Skips stashed inside `first`..`last` and popped after it."""
        return [s for s in self.skips if first <= s.source <= last < s.target]

    def skips_over(self, first: int, last: int) -> list[Skip]:
        """Skips that pass over `first`..`last` altogether."""
        return [s for s in self.skips if s.source < first and s.target > last]


LARGEST, LARGEST_FLOPS = 10**15, 1e21
"""Of bytes (a petabyte) and seconds; what is larger is a mistake, and would overflow sums."""


def _check(what: str, value: float) -> None:
    largest = LARGEST_FLOPS if what.startswith("flops") else LARGEST
    if not (math.isfinite(value) and 0 <= value <= largest):
        raise ValueError(f"{what} is {value}, must be a number of at least 0 and at most {largest:g}")


def _named(skips: tuple[Skip, ...]) -> tuple[Skip, ...]:
    """Every skip has a name of its own; one without is called after its layers. Raises ValueError for a name twice."""
    found: list[Skip] = []
    taken = {skip.name for skip in skips if skip.name}
    for skip in skips:
        name, more = skip.name or f"skip_{skip.source}_{skip.target}", 1
        while not skip.name and name in taken:
            more += 1
            name = f"skip_{skip.source}_{skip.target}_{more}"
        if any(other.name == name for other in found):
            raise ValueError(f"two skips are called {name}, each needs a name of its own")
        taken.add(name)
        found.append(replace(skip, name=name))
    return tuple(found)
