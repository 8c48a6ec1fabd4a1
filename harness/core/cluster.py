"""Devices and the links between them. GB = 1e9 bytes; bandwidths are for each direction."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from harness.core.serialization import Document

Duplex = Literal["half", "full"]
MATMULS = ("matmul", "convolution", "attention")
CLASSES = (*MATMULS, "elementwise", "image", "float32")
"""Of kernels: those of a class reach the same share of a device's peak."""
HALVES = ("float16", "bfloat16")
"""The formats of two bytes, for which tensor cores were made."""
SEND = "send"
"""The name of a message among the calls of a machine's processes."""


@dataclass(frozen=True)
class Device:
    """One accelerator or CPU device. `peak_flops` is FLOP/s for each dtype, `memory_bandwidth` bytes/s.

    `efficiency` is the share of both peaks that a large kernel reaches, `efficiencies` that of the kernels of a class
    ("matmul", "convolution", "attention": of the FLOP/s; "elementwise": of the bandwidth), where it is known.
    "image" is the share of elementwise kernels in convolutional nets (else that of all), "float32" that of matmuls and
    convolutions in float32: where there is one, those of the classes are of `HALVES` alone (else of every format).
    These are calibrated. Each kernel costs `kernel_s` more, so that small ones reach less. `wave_elements` of a
    matmul's output are computed at once (0: not known), in float32 `float32_wave_elements` (0: as many): on average a
    matmul computes half of them too many.
    """

    name: str = "device"
    memory_bytes: int = 16 * 10**9
    peak_flops: dict[str, float] = field(default_factory=dict)
    memory_bandwidth: float = 0.0
    efficiency: float = 1.0
    kernel_s: float = 0.0
    wave_elements: int = 0
    efficiencies: dict[str, float] = field(default_factory=dict)
    float32_wave_elements: int = 0

    def efficiency_of(self, kernels: str) -> float:
        """Returns the share of the peak that large kernels of a class reach."""
        if kernels == "image" and kernels not in self.efficiencies:
            return self.efficiency_of("elementwise")
        return self.efficiencies.get(kernels, self.efficiency)

    def counts_as(self, kernels: str, dtype: str) -> str:
        """Returns the class whose share counts for one of `MATMULS` in a number format; "" where the known shares are
        of other formats."""
        if "float32" not in self.efficiencies or dtype in HALVES:
            return kernels
        return "float32" if dtype == "float32" and kernels != "attention" else ""

    def is_calibrated(self, kernels: str) -> bool:
        """Returns whether that share is known; else times are only bounds."""
        return self.efficiency_of(kernels) != 1

    def wave_of(self, dtype: str) -> int:
        """Returns the elements of a matmul's output that are computed at once in a number format; 0: not known."""
        return (self.float32_wave_elements if dtype == "float32" else 0) or self.wave_elements


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes `alpha_s` + n * `beta_s_per_byte`; `half` duplex shares both directions."""

    alpha_s: float = 0.0
    beta_s_per_byte: float = 0.0
    duplex: Duplex = "full"

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}, must be a finite number of at least 0")

    def seconds(self, size: float) -> float:
        """Returns the seconds of one message of `size` bytes."""
        return self.alpha_s + size * self.beta_s_per_byte


@dataclass(frozen=True)
class CallTimes:
    """Seconds of a call among `members` processes of a machine, by its bytes, as measured.

    `name` is a collective's ("all_reduce"), or `SEND`. `bytes` ascend; they are counted as those of an
    op: the whole buffer. Between two sizes, and after the last, times are on a straight line.
    """

    name: str
    members: int
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(small < large for small, large in pairwise(self.bytes))
        if not ascending or len(self.bytes) != len(self.seconds) or len(self.bytes) < 2:
            raise ValueError(
                f"bytes of {self.name} are {self.bytes}, must be two or more that ascend, each with a time"
            )
        if not all(math.isfinite(one) and one >= 0 for one in self.seconds):
            raise ValueError(f"seconds of {self.name} are {self.seconds}, must be finite numbers of at least 0")

    def at(self, size: float) -> float:
        """Returns the seconds of a call of `size` bytes: that of the smallest one, at least."""
        place = min(max(1, bisect.bisect_left(self.bytes, size)), len(self.bytes) - 1)
        (small, large), (first, last) = self.bytes[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        slope = max(0.0, last - first) / (large - small)
        return first + slope * max(0.0, size - small)


class Held(NamedTuple):
    """Of a stage: layers that have weights, these weights, their bytes, batch norms, and the bytes that these read."""

    layers: float
    weights: float
    bytes: float
    norms: float
    norm_bytes: float


OF_HELD = ("layer_s", "weight_s", "byte_s", "norm_s", "norm_byte_s")
"""The costs of what a stage holds, in the order of `Held`."""


@dataclass(frozen=True)
class TaskCost:
    """What the host takes for an op of a `kind` ("F", "B", "R", "W", "step") beyond its kernels, or for
    each call of a "collective".

    `base_s` for each op, `layer_s` for each layer of its stage that has weights, `weight_s` for each weight, `byte_s`
    for each byte of these, `norm_s` for each batch norm, whose sums an engine may have to exchange, and `norm_byte_s`
    for each byte that it reads. `share` is by which part of their own time kernels take longer than in a profile, since
    other devices compute meanwhile: they share caches and memory.
    """

    kind: str
    base_s: float = 0.0
    layer_s: float = 0.0
    weight_s: float = 0.0
    byte_s: float = 0.0
    norm_s: float = 0.0
    norm_byte_s: float = 0.0
    share: float = 0.0

    def __post_init__(self) -> None:
        for name, value in zip(("base_s", "share", *OF_HELD), (self.base_s, self.share, *self._of_held), strict=True):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of {self.kind} is {value}, must be a finite number of at least 0")

    def seconds(self, held: Held) -> float:
        """Returns the seconds of an op of a stage that holds so much, but for the share of its kernels."""
        return self.base_s + self.rest_s(held)

    def rest_s(self, held: Held) -> float:
        """Returns the part of `seconds` that depends on what the stage holds."""
        return sum(cost * count for cost, count in zip(self._of_held, held, strict=True))

    @property
    def half(self) -> TaskCost:
        """That of half of a task, of which what depends on the stage is half as much."""
        return replace(self, **{name: getattr(self, name) / 2 for name in OF_HELD})

    @cached_property
    def _of_held(self) -> tuple[float, ...]:
        """In the order of `Held`."""
        return tuple(getattr(self, name) for name in OF_HELD)


@dataclass(frozen=True)
class EngineCosts(Document):
    """What an engine takes on this machine's CPU devices beyond kernels and messages: its Python, and the interpreter's
    lock where devices are threads (`harness.worker.measure_engine`).

    `optimizer` says with which one it was measured. `host_s` passes before each task of a device, `step_s` once more
    before its first one; its core is free meanwhile. `slowed` is by how much other programs slowed the measurement
    down. `why` says why nothing is known, where that is so.
    """

    engine: str
    optimizer: str
    ops: tuple[TaskCost, ...] = ()
    host_s: float = 0.0
    step_s: float = 0.0
    slowed: float = 1.0
    why: str = ""

    def of(self, kind: str) -> TaskCost:
        """Returns the cost of an op. A recomputation that was not measured is a forward pass, a half of a backward pass
        `TaskCost.half`."""
        if kind not in self._found:
            self._found[kind] = self._of(kind)
        return self._found[kind]

    @cached_property
    def _found(self) -> dict[str, TaskCost]:
        """Those that were asked for."""
        return {}

    def _of(self, kind: str) -> TaskCost:
        known = {one.kind: one for one in self.ops}
        if kind in ("I", "W") and kind not in known and "B" in known:
            return known["B"].half
        return known.get(kind) or known.get({"R": "F"}.get(kind, ""), TaskCost(kind))


UNKNOWN_COSTS = EngineCosts("", "")


@dataclass(frozen=True)
class Cluster(Document):
    """`nodes` x `devices_per_node` equal devices.

    Every two devices of a node have a link of their own (`intra`), one message at a time in each direction. All
    transfers that leave or enter a node at the same time share its one `node_port` fairly. `host_link` is a device's
    own path to the host's memory. With `blocking_messages` a message occupies both ends' compute (rendezvous). `cores`
    is how many devices of a node can compute at full speed at once: CPU devices share cores; 0 means all of them.
    `process_cores` is the same where each device is a process, which competes for no interpreter; 0 means `cores`.
    `calls` are what the processes of a node need for calls of their library (gloo): where there are some, they count
    for messages and collectives inside a node, instead of `intra`. `overlap` is the share of a collective's time that
    is hidden where it runs while a device computes. `task_s` is what each forward and each backward task takes beyond
    its kernels: the host between two tasks, waiting for messages and the like. Each call of a collective takes
    `collective_call_s` in addition to its messages, unless its time is among `calls`. A transfer that has a node's port
    to itself gets `alone_bandwidth` in bytes/s, if that is more than what several share. `slow` has devices, by their
    number in the cluster, and how many times as long their tasks take. `engines` are the costs of engines, as far as
    they were measured.
    """

    name: str = "flat"
    nodes: int = 1
    devices_per_node: int = 1
    device: Device = Device()
    intra: Link = Link()
    node_port: Link = Link()
    host_link: Link = Link()
    blocking_messages: bool = False
    cores: float = 0.0
    process_cores: float = 0.0
    calls: tuple[CallTimes, ...] = ()
    overlap: float = 1.0
    slow: tuple[tuple[int, float], ...] = ()
    task_s: float = 0.0
    alone_bandwidth: float = 0.0
    collective_call_s: float = 0.0
    engines: tuple[EngineCosts, ...] = ()

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def places_equally(self, group: int) -> bool:
        """Whether groups of so many devices, one after the other, are each on one node, or each on whole nodes."""
        each = self.devices_per_node
        return self.nodes == 1 or each % group == 0 or group % each == 0

    @property
    def alone_s_per_byte(self) -> float:
        """Seconds of a byte through a node's port, for a transfer that has it to itself."""
        port = self.node_port.beta_s_per_byte
        return min(port, 1 / self.alone_bandwidth) if self.alone_bandwidth else port

    def used_with(self, engine: str, optimizer: str) -> Cluster:
        """Returns the cluster for one engine: `engines` has its costs alone, if they are known."""
        own = (one for one in self.engines if (one.engine, one.optimizer) == (engine, optimizer))
        return replace(self, engines=tuple(own))

    @property
    def engine_costs(self) -> EngineCosts:
        """Those of the engine that uses the cluster (`used_with`): nothing where they are not known."""
        return self.engines[0] if len(self.engines) == 1 else UNKNOWN_COSTS

    def link(self, source: int, target: int) -> Link:
        """Returns the link between two devices: inside their node, or through the nodes' ports."""
        return self.intra if self.node(source) == self.node(target) else self.node_port

    def call_s(self, name: str, members: int, size: float) -> float | None:
        """Returns the seconds of a call of processes of one node; None where that is not measured.

        Between two numbers of members on a straight line; with more than were measured, in proportion to the messages
        of a ring.
        """
        known = sorted((one for one in self.calls if one.name == name), key=lambda one: one.members)
        if not known:
            return None
        above = next((one for one in known if one.members >= members), known[-1])
        if members >= above.members:
            return above.at(size) * (members - 1) / (above.members - 1)
        below = max((one for one in known if one.members < members), key=lambda one: one.members, default=above)
        if below is above:
            return above.at(size)
        share = (members - below.members) / (above.members - below.members)
        return below.at(size) + share * (above.at(size) - below.at(size))

    def node(self, device: int) -> int:
        """Returns the node that a device belongs to."""
        return device // self.devices_per_node
