"""The layout of a partitioned sequence: the device of each stage, and the tensors sent between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from harness.nn import skip
from harness.schedule.transfers import StageSkip, Transfer, transfers


@dataclass(frozen=True)
class StageLayout:
    """`devices[j]` is the index of stage j's device; `transfers` are all values that pass from stage to stage."""

    devices: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    @property
    def stages(self) -> int:
        return len(self.devices)

    def into(self, stage: int, copied: bool) -> list[Transfer]:
        """Transfers that arrive at `stage`: those that are copied, or those that stay on its device."""
        return [h for h in self.transfers if h.target == stage and self.is_copied(h) == copied]

    def out_of(self, stage: int) -> list[Transfer]:
        return [h for h in self.transfers if h.source == stage]

    def is_copied(self, transfer: Transfer) -> bool:
        return self.devices[transfer.source] != self.devices[transfer.target]


def layout(
    layers: Sequence[tuple[str, nn.Module]], balance: Sequence[int], devices: Sequence[int], portals: bool
) -> StageLayout:
    """The layout of `layers` cut into `balance`. Raises ValueError, naming the layers, where skips don't match."""
    stage_of = [stage for stage, count in enumerate(balance) for _ in range(count)]
    skips = [
        StageSkip(stage_of[found.source], stage_of[found.target], found.name)
        for found in skip.layer_skips(layers)
        if stage_of[found.source] != stage_of[found.target]
    ]
    return StageLayout(tuple(devices), tuple(transfers([0] * (len(balance) - 1), skips, portals)))
