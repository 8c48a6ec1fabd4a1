"""Places layers so that devices need the least memory, whatever the period."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from harness.core.plan import Stage
from planners.periodic import contiguous_partition
from planners.periodic.bounds import sequential
from planners.periodic.layer_ticks import Chain
from planners.periodic.milp import Row, minimize
from planners.periodic.reassign_devices import Allocation, join_adjacent


def pack_layers(chain: Chain, devices: int, limit_s: float) -> tuple[int, Allocation]:
    """Returns the fewest bytes of a device that were found to be enough in about `limit_s` seconds, and stages for
    them.

    The search stops at `chain.memory`. Any layer may be on any device. With one micro-batch at a time
    (`bounds.sequential`) a device stores what all its layers store of it, and no schedule stores less: when the last of
    them begins, the others have not ended.
    """
    least = contiguous_partition.least_memory(chain, devices)
    consecutive = contiguous_partition.best(replace(chain, memory=least), devices)
    assert consecutive is not None
    if least > max(0, chain.memory) and limit_s > 0:
        stages = _Packing(chain, min(devices, chain.layers), least).solved(limit_s)
        if stages is not None and (needed := needed_bytes(chain, stages)) < least:
            return needed, stages
    return least, consecutive[1]


def needed_bytes(chain: Chain, stages: Allocation) -> int:
    """Returns the fewest bytes of a device with which these stages have a schedule."""
    return max(sequential(chain, stages).memory().values())


@dataclass(frozen=True)
class _Packing:
    """The integer program. Columns: bytes of the fullest device, in parts of `enough`; for each device, whether it has
    a layer, whether it is on one side of a cut, whether it has some shared state."""

    chain: Chain
    devices: int
    enough: int

    def solved(self, limit_s: float) -> Allocation | None:
        chain = self.chain
        rows = [*self._once(), *self._cut(), *self._have(), *self._fit()]
        all_bytes = chain.states[-1] - chain.counted_twice([range(chain.layers)]) + chain.stores[-1]
        least = min(1.0, max(chain.memory, all_bytes / self.devices) / self.enough)
        count = self._has(chain.layers, 0)
        others = self.devices * (chain.layers + 1 + len(chain.shared))
        # devices are equal: layer n is on one of the first n + 1
        first = [float(device <= layer) for layer in range(chain.layers) for device in range(self.devices)]
        low, high = [least] + [0.0] * (count - 1 + others), [1.0, *first] + [1.0] * others
        whole = [0 < column < count for column in range(len(low))]
        answer = minimize({0: 1.0}, rows, low, high, whole, limit_s)
        if answer.x is None:
            return None
        of_layer = [answer.x[self._has(n, 0) : self._has(n + 1, 0)].argmax() for n in range(chain.layers)]
        return tuple(join_adjacent([Stage(layer, layer, int(device)) for layer, device in enumerate(of_layer)]))

    def _has(self, layer: int, device: int) -> int:
        return 1 + layer * self.devices + device

    def _cuts(self, boundary: int, device: int) -> int:
        return self._has(self.chain.layers + boundary, device)

    def _shares(self, number: int, device: int) -> int:
        return self._cuts(self.chain.layers + 1 + number, device)

    def _once(self) -> Iterator[Row]:
        for layer in range(self.chain.layers):
            yield {self._has(layer, device): 1.0 for device in range(self.devices)}, 1.0, 1.0

    def _cut(self) -> Iterator[Row]:
        for boundary in range(1, self.chain.layers):
            for device in range(self.devices):
                previous, following = self._has(boundary - 1, device), self._has(boundary, device)
                yield {self._cuts(boundary, device): 1.0, previous: -1.0, following: 1.0}, 0.0, 2.0
                yield {self._cuts(boundary, device): 1.0, previous: 1.0, following: -1.0}, 0.0, 2.0

    def _have(self) -> Iterator[Row]:
        for number, shared in enumerate(self.chain.shared):
            for device in range(self.devices):
                for layer in shared.layers:
                    yield {self._shares(number, device): 1.0, self._has(layer, device): -1.0}, 0.0, 1.0

    def _fit(self) -> Iterator[Row]:
        for device in range(self.devices):
            sizes = {self._has(n, device): size for n, size in enumerate(self._layer_bytes)}
            sizes |= {self._cuts(b, device): size for b, size in enumerate(self.chain.buffers)}
            sizes |= {self._shares(n, device): shared.bytes for n, shared in enumerate(self.chain.shared)}
            yield {0: 1.0} | {column: -size / self.enough for column, size in sizes.items()}, 0.0, 1.0

    @cached_property
    def _layer_bytes(self) -> list[int]:
        """Bytes of each layer with one micro-batch, without shared state."""
        sizes = [state + stored for state, stored in zip(self.chain.state, self.chain.stored, strict=True)]
        for shared in self.chain.shared:
            for layer in shared.layers:
                sizes[layer] -= shared.bytes
        return sizes
