"""A plan: which layers run where, in how many micro-batches, and what that is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.mesh import Mesh
from harness.pattern import Pattern
from harness.serial import Document


@dataclass(frozen=True)
class Stage:
    """Layers `first`..`last` (0-based, both included) on `device`. A device may own several stages (MadPipe)."""

    first: int
    last: int
    device: int

    @property
    def layers(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Plan(Document):
    """What a planner returns and an engine runs.

    `recompute` is the checkpoint mode ("always", "except_last", "never"), `strategy` the (p0, p1, p2) of each matrix
    product under SBP, `predicted` the expected `step_time_s`, `peak_memory_bytes` (one for each device) and the like.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    micro_batches: int = 1
    recompute: str = "never"
    strategy: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pattern: Pattern | None = None
    predicted: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a plan needs at least one stage")
        expected = 0
        for number, stage in enumerate(self.stages):
            if stage.first != expected or stage.last < stage.first:
                raise ValueError(
                    f"stage {number} holds layers {stage.first}..{stage.last}, it must begin with layer {expected}"
                )
            expected = stage.last + 1

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that own a stage, in order."""
        return tuple(sorted({stage.device for stage in self.stages}))

    @property
    def balance(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    def stage_of(self, layer: int) -> int:
        """Index of the stage that holds `layer`; raises IndexError for a layer that is in none."""
        for number, stage in enumerate(self.stages):
            if stage.first <= layer <= stage.last:
                return number
        raise IndexError(f"layer {layer} is none of the plan's {self.stages[-1].last + 1} layers")

    @staticmethod
    def contiguous(balance: tuple[int, ...] | list[int], micro_batches: int = 1, recompute: str = "never") -> Plan:
        """Stage j holds `balance[j]` layers and runs on device j."""
        stages, first = [], 0
        for device, layers in enumerate(balance):
            stages.append(Stage(first, first + layers - 1, device))
            first += layers
        return Plan(Mesh(pipeline=len(stages)), tuple(stages), micro_batches, recompute)
