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
class Traffic:
    """What the devices of a stage tell each other under tensor parallelism, all of one `algorithm` in one `phase`.

    Phase "forward", "recompute" and "backward" are of one micro-batch, "weights" (sums of gradients) of a step. `bytes`
    are sent by each device.
    """

    algorithm: str
    phase: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Plan(Document):
    """What a planner returns and an engine runs.

    `recompute` is the checkpoint mode ("always", "except_last", "never"), `predicted` the expected `step_time_s`,
    `peak_memory_bytes` (one for each device) and the like.

    With `mesh.tensor` devices for each stage, `strategy` has the (p0, p1, p2) of each matrix product, and `layouts` by
    how many devices the samples are split where its input comes from and where its output goes; all others split
    features there. A third number is where the attention behind a product lies, if neither there nor where the next one
    comes from, or where that lies which a product is added to, before it comes to where the product goes. Where nodes
    have several devices each of these numbers is two: nodes, and devices of each. An input that lies ready comes from
    (). "output" is where the model's output is brought to, if it is. `traffic` is what each stage's devices send.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    micro_batches: int = 1
    recompute: str = "never"
    strategy: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    traffic: tuple[tuple[Traffic, ...], ...] = ()
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
