"""Devices and the links between them. GB = 1e9 bytes; bandwidths are for each direction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from harness.core.serialization import Document

Duplex = Literal["half", "full"]


@dataclass(frozen=True)
class Device:
    """One accelerator or CPU device. `peak_flops` is FLOP/s for each dtype, `memory_bandwidth` bytes/s.

    `efficiency` is the share of both peaks that a large kernel reaches: the one number of a device that is calibrated.
    Each kernel costs `kernel_s` more, so that small ones reach less. `wave_elements` of a matmul's output are
    computed at once (0: not known): on average a matmul computes half of them too many.
    """

    name: str = "device"
    memory_bytes: int = 16 * 10**9
    peak_flops: dict[str, float] = field(default_factory=dict)
    memory_bandwidth: float = 0.0
    efficiency: float = 1.0
    kernel_s: float = 0.0
    wave_elements: int = 0


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
class Cluster(Document):
    """`nodes` x `devices_per_node` equal devices.

    Every two devices of a node have a link of their own (`intra`), one message at a time in each direction. All
    transfers that leave or enter a node at the same time share its one `node_port` fairly. `host_link` is a device's
    own path to the host's memory. With `blocking_messages` a message occupies both ends' compute (rendezvous). `cores`
    is how many devices of a node can compute at full speed at once: CPU devices share cores; 0 means all of them.
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

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def link(self, source: int, target: int) -> Link:
        """Returns the link between two devices: inside their node, or through the nodes' ports."""
        return self.intra if self.node(source) == self.node(target) else self.node_port

    def node(self, device: int) -> int:
        """Returns the node that a device belongs to."""
        return device // self.devices_per_node
