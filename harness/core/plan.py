"""A plan: which layers run on which device, in how many micro-batches, with the predicted cost; and the device mesh."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from harness.core.pattern import Pattern
from harness.core.serialization import Document


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
    """Bytes that the devices of a stage send under tensor parallelism, by one `algorithm` in one `phase`.

    The phases "forward", "recompute" and "backward" are those of one micro-batch, "weights" (all-reduce of gradients)
    that of a step. Each device sends `bytes`.
    """

    algorithm: str
    phase: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Plan(Document):
    """The result of a planner, which an engine runs.

    `recompute` is the checkpoint mode ("always", "except_last", "never"), `predicted` the expected `step_time_s`,
    `peak_memory_bytes` (one for each device) and the like.

    With `mesh.tensor` devices for each stage (the tensor parallel size), `strategy` has the (p0, p1, p2) of each
    matmul, and `layouts` the number of devices that split the samples of its input and of its output; all others split
    features. A third number is the layout of the attention after a matmul, if it is neither of these nor the next
    matmul's input; or the layout of the tensor that its output is added to, before that moves to the output's layout.
    Where nodes have several devices each of these numbers is two: nodes, and devices of each. An input that needs no
    communication has (). "output" is the required layout of the model's output, if there is one. `traffic` is what each
    stage's devices send.

    `order` is that of the tasks on each device, as actions such as "2F0" (`harness.schedule.action_file`), where the
    engine reads it from a file or searches it; without it the engine's own schedule follows from the rest.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    micro_batches: int = 1
    recompute: str = "never"
    strategy: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    traffic: tuple[tuple[Traffic, ...], ...] = ()
    pattern: Pattern | None = None
    order: tuple[tuple[str, ...], ...] = ()
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
    def used(self) -> Mesh:
        """The mesh of the devices that own a stage: of `mesh`, a planner may leave some idle."""
        return replace(self.mesh, pipeline=len(self.devices))

    @property
    def splits_samples_only(self) -> bool:
        """Whether the tensor parallel devices of each stage have whole weights, and parts of the samples: every
        strategy is (devices, 1, 1), or a mesh of one column."""
        thirds = (len(numbers) // (3 if len(numbers) % 3 == 0 else 2) for numbers in self.strategy.values())
        rest = (numbers[first:] for first, numbers in zip(thirds, self.strategy.values(), strict=True))
        return bool(self.strategy) and all(number == 1 for numbers in rest for number in numbers)

    @property
    def balance(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    def stage_of(self, layer: int) -> int:
        """Returns the index of the stage that holds `layer`; raises IndexError for a layer that is in none."""
        for number, stage in enumerate(self.stages):
            if stage.first <= layer <= stage.last:
                return number
        raise IndexError(f"layer {layer} is not one of the plan's {self.stages[-1].last + 1} layers")

    @staticmethod
    def contiguous(balance: tuple[int, ...] | list[int], micro_batches: int = 1, recompute: str = "never") -> Plan:
        """Returns a plan whose stage j holds `balance[j]` layers and runs on device j."""
        stages, first = [], 0
        for device, layers in enumerate(balance):
            stages.append(Stage(first, first + layers - 1, device))
            first += layers
        return Plan(Mesh(pipeline=len(stages)), tuple(stages), micro_batches, recompute)


@dataclass(frozen=True)
class Mesh:
    """The device mesh: pipeline x data x tensor parallel sizes (PP, DP, TP). Other keys for a degree follow
    `mesh.*`."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.data * self.pipeline * self.tensor

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank's device."""
        return rank % (self.pipeline * self.tensor) // self.tensor
