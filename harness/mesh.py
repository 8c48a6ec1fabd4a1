"""The grid of devices: how many replicas, pipeline stages and tensor shards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """data x pipeline x tensor devices. `mesh.*` is the truth; other keys that mean a degree follow it."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.data * self.pipeline * self.tensor
