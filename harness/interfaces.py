"""The common interface: what a model, a data set, a planner and an engine must offer to take part.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from harness.cluster import Cluster
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.trace import Trace

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one global mini-batch; the first dimension of both is the sample."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


class Model(Protocol):
    """A network as a sequence of layers, and what it is trained on."""

    name: str
    task: str  # "segmentation" | "classification" | "text"
    input_shape: tuple[int, ...]  # of one sample
    classes: int  # targets are 0 .. classes - 1 (for text: the vocabulary); 0 where they are no classes

    def layers(self) -> nn.Sequential:
        """The layers, freshly initialized from torch's random generator, on the current default device."""
        ...

    def sample(self, n: int) -> Batch:
        """n synthetic samples, drawn from torch's random generator."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the samples' losses; that of a sample is the mean over its pixels or tokens."""
        ...


class Data(Protocol):
    """A source of batches: `batch(step, size)` is a pure function, so a run can go on from any step.

    It is called in a thread of its own while an earlier step runs: it must not draw from torch's global generator.
    """

    def batch(self, step: int, size: int) -> Batch: ...


@dataclass(frozen=True)
class BatchShape:
    """`size` samples in all, cut into `micro_batches` for each pipeline replica."""

    size: int
    micro_batches: int


@dataclass(frozen=True)
class PlanRequest:
    """What a planner is asked beside profile and cluster: degrees of the mesh that are given, batch, checkpointing.

    `placement[j]` is the device of stage j, for engines that have several stages on a device; without it there are
    `pipeline` stages, stage j on device j.
    """

    batch: BatchShape
    pipeline: int
    data: int = 1
    tensor: int = 1
    recompute: str = "never"
    placement: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each stage."""
        return self.placement or tuple(range(self.pipeline))


class Planner(Protocol):
    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Raises `harness.problem.NoPlan`, naming what binds, where no plan exists."""
        ...


@dataclass(frozen=True)
class Setting:
    """What the user has set of the engine ("engine.zero=2"), and what to set instead ("engine.zero=1")."""

    typed: str
    instead: str


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; the contract tests print what they exclude.

    `ranks`: it runs as a process for each device of the mesh (`harness.ranks`), not as one for all; `mpi`: these are an
    MPI world, too. `in_turn`: its CPU devices compute one at a time. Of `dtypes` and `optimizers` the first is the one
    to fall back on. `elsewhere` names degrees that it has only on described clusters, as many as are asked for.
    `because` has, by the name of a field here, the setting that keeps the engine from what it could do otherwise.
    """

    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16")
    optimizers: tuple[str, ...] = ("sgd", "adam", "adamw")
    pipeline: bool = True
    data: bool = False
    tensor: bool = False
    skips: bool = True
    tuples: bool = True
    dropout: bool = True
    trace: bool = True
    memory_meter: bool = True
    ranks: bool = False
    mpi: bool = False
    in_turn: bool = False
    elsewhere: tuple[str, ...] = ()
    because: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch optimizer by name ("sgd", "adam", "adamw") and its numbers."""

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class SessionSpec:
    """What a session needs beside model and plan. `devices[d]` is the torch device of the plan's device d."""

    devices: tuple[str, ...]
    optimizer: OptimizerSpec = OptimizerSpec()
    dtype: str = "float32"
    autocast: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class StepMetrics:
    """One step. `peak_memory_bytes` has an entry for each device, or is None where this step was not metered.

    `skipped` says why the optimizer left the step out, as it does of gradients that are no numbers, and the mend
    ("what -> mend"); it is "" of any other step.
    """

    loss: float
    step_time_s: float
    bytes_sent: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: list[int] | None = None
    skipped: str = ""


class Session(Protocol):
    """A model in training. On every rank of an engine; its methods are collective, results complete on rank 0.

    All that takes long, or a group of ranks, begins with its context: it is made before ranks are forked.
    """

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        """Forward, backward and one optimizer step on a global batch; `meter` counts memory (slower on CPU)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """{"model": ..., "optimizer": {name: {...}}, "step": steps done}, with the keys of the unsplit Sequential.

        Where losses are scaled, "loss_scale" says what else has to go on: an engine that knows it not leaves it alone.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def trace(self) -> Trace:
        """The last steps, at most `harness.trace.KEPT_STEPS` of them."""
        ...


class Engine(Protocol):
    """Executes plans. Built from its own config; building and checking must not import torch.

    An engine that inherits from it refuses nothing, has one stage on each device, and takes layers and the optimizer's
    memory as they are, unless it says otherwise.
    """

    capabilities: Capabilities

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """What keeps it from any plan that was asked for so: all that can be told without a profile.

        `dtype` is that of the weights ("float32"). It is asked before the model is profiled, and again of the mesh that
        is planned for.
        """
        return []

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """What keeps it from executing this plan, beyond what it `refuses`."""
        return []

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """What the user should know of a plan that is executed all the same: settings that do nothing. The profile is
        that of the model, without what `layers` makes of it."""
        return []

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule: ...

    def placement(self, pipeline: int) -> tuple[int, ...]:
        """The device of each stage on `pipeline` devices; empty: one stage for each, in order."""
        return ()

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """What the engine makes of the optimizer's memory model: state that it shards, copies that it keeps."""
        return model

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        """What the engine makes of the layers that the plan was made for: times and bytes of what it recomputes inside
        a backward pass. It is asked after the plan is made; schedule and simulator see this profile."""
        return profile

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]: ...
