"""The layout of a partitioned sequence: the device of each stage, and the tensors sent between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import nn

from harness.nn import skip
from harness.schedule.transfers import StageSkip, Transfer, transfers


@dataclass(frozen=True)
class StageLayout:
    """`devices[j]` is the index of stage j's device; `transfers` are all values that pass from stage to stage.

    `ends[j]` is the number of layers up to the end of stage j, `makers` has the layer that stashes each skip."""

    devices: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    ends: tuple[int, ...] = ()
    makers: Mapping[str, int] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.devices)

    def into(self, stage: int, copied: bool) -> list[Transfer]:
        """Transfers that arrive at `stage`: those that are copied, or those that stay on its device."""
        return [h for h in self.transfers if h.target == stage and self.is_copied(h) == copied]

    def out_of(self, stage: int) -> list[Transfer]:
        return [h for h in self.transfers if h.source == stage]

    def goes_back(self, stage: int, prefix: int) -> bool:
        """Whether a stage has a backward pass, where the first `prefix` layers of the model are frozen."""
        return not prefix or self.ends[stage] > prefix

    def is_graded(self, transfer: Transfer, prefix: int) -> bool:
        """Whether a gradient of a value is needed."""
        return not prefix or self.makers.get(transfer.part, self.ends[transfer.source] - 1) >= prefix

    def graded_into(self, stage: int, prefix: int) -> dict[str, bool]:
        """For each value that arrives at `stage`, by its part, whether a gradient of it is needed."""
        return {h.part: self.is_graded(h, prefix) for h in self.transfers if h.target == stage}

    def is_copied(self, transfer: Transfer) -> bool:
        return self.devices[transfer.source] != self.devices[transfer.target]


def layout(
    layers: Sequence[tuple[str, nn.Module]], balance: Sequence[int], devices: Sequence[int], portals: bool
) -> StageLayout:
    """The layout of `layers` cut into `balance`. Raises ValueError, naming the layers, where skips don't match."""
    stage_of = [stage for stage, count in enumerate(balance) for _ in range(count)]
    every = skip.layer_skips(layers)
    skips = [
        StageSkip(stage_of[found.source], stage_of[found.target], found.name)
        for found in every
        if stage_of[found.source] != stage_of[found.target]
    ]
    passing = tuple(transfers([0] * (len(balance) - 1), skips, portals))
    return StageLayout(
        tuple(devices), passing, tuple(accumulate(balance)), {found.name: found.source for found in every}
    )
