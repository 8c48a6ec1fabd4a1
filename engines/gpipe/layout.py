"""How a partitioned sequence hangs together: which stage runs where, and what travels between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from harness import skip
from harness.schedule.hops import Hop, StageSkip, hops


@dataclass(frozen=True)
class Layout:
    """`devices[j]` is the index of stage j's device; `hops` are all values that pass from stage to stage."""

    devices: tuple[int, ...]
    hops: tuple[Hop, ...]

    @property
    def stages(self) -> int:
        return len(self.devices)

    def into(self, stage: int, copied: bool) -> list[Hop]:
        """Hops that arrive at `stage`: those that are copied, or those that stay on its device."""
        return [h for h in self.hops if h.target == stage and self.is_copied(h) == copied]

    def out_of(self, stage: int) -> list[Hop]:
        return [h for h in self.hops if h.source == stage]

    def is_copied(self, hop: Hop) -> bool:
        return self.devices[hop.source] != self.devices[hop.target]


def layout(layers: Sequence[tuple[str, nn.Module]], balance: Sequence[int], devices: Sequence[int],
           portals: bool) -> Layout:  # fmt: skip
    """The layout of `layers` cut into `balance`. Raises ValueError, naming the layers, where skips don't match."""
    stage_of = [stage for stage, count in enumerate(balance) for _ in range(count)]
    skips = [
        StageSkip(stage_of[found.source], stage_of[found.target], found.name)
        for found in skip.layer_skips(layers)
        if stage_of[found.source] != stage_of[found.target]
    ]
    return Layout(tuple(devices), tuple(hops([0] * (len(balance) - 1), skips, portals)))
