"""The interfaces of models, data sets, planners and engines. docs/howto has a complete one of each.

The sessions of engines have two base classes: `harness.runtime.local_session.LocalSession`, one process for all
devices, and `harness.runtime.distributed_session.DistributedSession`, one for each. This module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import Fix, Problem
from harness.core.trace import Trace
from harness.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one global mini-batch: tensors whose first dimension is the sample.

    `inputs` is what the first layer takes, `targets` what the loss takes: each a tensor, or a tuple of them.
    """

    inputs: Tensor | tuple[Tensor, ...]
    targets: Tensor | tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.targets[0] if isinstance(self.targets, tuple | list) else self.targets)


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

    def loss(self, output: Any, target: Any) -> Tensor:
        """The sum of the samples' losses; that of a sample is the mean over its pixels or tokens."""
        ...


class Data(Protocol):
    """A source of batches: `batch(step, size)` is a pure function, so a run can continue from any step.

    It is called in a thread of its own while an earlier step runs: it must not draw from torch's global generator.
    """

    def batch(self, step: int, size: int) -> Batch:
        """Return the batch of a step: `size` samples, the same ones for every call with this `step`."""
        ...


@dataclass(frozen=True)
class BatchShape:
    """`size` samples in all, cut into `micro_batches` for each pipeline replica."""

    size: int
    micro_batches: int


Refused = Callable[[Plan], Sequence[Problem]]
"""What keeps a plan with other stages from running: layers that must be in one stage, and what the engine refuses."""


@dataclass(frozen=True)
class PlanRequest:
    """The request to a planner, in addition to profile and cluster: the mesh, the batch, activation checkpointing.

    `placement[j]` is the device of stage j, for engines that have several stages on a device; without it there are
    `pipeline` stages, stage j on device j. `layers` are those of the model, where it is known. `refused` says why the
    engine cannot run a plan, for planners that have another one. A search over many plans does without the baselines
    that a plan `compares` itself with.
    """

    batch: BatchShape
    pipeline: int
    data: int = 1
    tensor: int = 1
    recompute: str = "never"
    placement: tuple[int, ...] = ()
    layers: int | None = None
    refused: Refused = lambda plan: ()
    compares: bool = True

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each stage."""
        return self.placement or tuple(range(self.pipeline))


class Planner(Protocol):
    """Places the layers of a model on the devices of a cluster."""

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Raises `harness.core.problem.NoPlan`, naming what binds, where no plan exists."""
        ...


@dataclass(frozen=True)
class Searched:
    """The `values` of a key that mode=tune tries; where the mesh has 1 for `degree` it leaves the key as it is."""

    values: tuple[Any, ...]
    degree: str = ""


@dataclass(frozen=True)
class Setting:
    """A setting of the user ({"engine.zero": 2}), and the one to use instead ({"engine.zero": 1})."""

    given: Fix
    instead: Fix


@dataclass(frozen=True)
class Capabilities:
    """Features that an engine supports. The first of `dtypes` and of `optimizers` is the one that fixes offer. `fused`
    are those of `optimizers` whose fused kernels it takes (`optimizer.fused`)."""

    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16")
    optimizers: tuple[str, ...] = ("sgd", "adam", "adamw", "nadam", "muon")
    fused: tuple[str, ...] = ("sgd", "adam", "adamw")
    pipeline: bool = True
    data: bool = False
    tensor: bool = False
    skips: bool = True
    tuples: bool = True
    dropout: bool = True
    trace: bool = True
    memory_meter: bool = True
    by_value: bool = True
    """Layers whose operations depend on the values of tensors."""
    complex: bool = True
    """Tensors of complex numbers from stage to stage."""
    mixed: bool = True
    """Tensors with and without a gradient, together from stage to stage."""
    same_memory: bool = True
    """Several weights of one stage that show the same memory."""
    sparse: bool = True
    """Sparse gradients."""
    scalars: bool = True
    """Weights without a dimension."""
    empty: bool = True
    """Weights without elements."""
    changed_weights: bool = True
    """Weights that a forward pass changes."""
    complex_weights: bool = True
    integer_weights: bool = True
    strided_weights: bool = True
    """Weights that are not contiguous in memory, such as transposed ones."""
    channels_last: bool = True
    """Weights that are not contiguous in memory, as those of `precision.channels_last`."""
    compiled: bool = False
    """Layers that torch.compile has compiled (`precision.compile`)."""
    grad_scaler: bool = False
    """Losses that are scaled under autocast (`precision.grad_scaler`)."""
    cuda_graphs: bool = False
    """Layers whose kernels are captured in CUDA graphs (`precision.cuda_graphs`)."""
    sharded_checkpoints: bool = False
    """Its sessions are a `ShardedSession` (`launch.sharded_checkpoints`)."""
    multi_process: bool = False
    """Whether it is one process for each device of the mesh (`harness.launch.forked_ranks`), not one for all."""
    mpi: bool = False
    """These processes form an MPI world, too."""
    serial_cpu_devices: bool = False
    """CPU devices compute one at a time."""
    halves: str = ""
    """An `engine.schedule` by which it is measured what halves of backward passes take; "" for none."""
    simulated_only: tuple[str, ...] = ()
    """Mesh dimensions that are planned and simulated, on any number of devices, and never run."""
    disabled_by: Mapping[str, Setting] = field(default_factory=dict)
    """Name of a field above -> the setting that disables the feature."""


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch optimizer by name ("sgd", "adam", "adamw", "nadam", "muon"), its numbers, and whether it is fused."""

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    fused: bool = False
    nesterov: bool = False
    beta1: float | None = None

    @property
    def betas(self) -> tuple[float, float]:
        """Those of Adam and its kin."""
        return 0.9 if self.beta1 is None else self.beta1, 0.999


@dataclass(frozen=True)
class SessionSpec:
    """Inputs of a session in addition to model and plan. `devices[d]` is the torch device of the plan's device d.

    `unused`: some weights get no gradient in a pass. `by_value`: which ones depends on the values of tensors.
    `channels_last`: weights of convolutions are in this order. `compile`: layers are compiled.
    `grad_scaler`: losses are scaled. `cuda_graphs`: layers are captured in CUDA graphs. `instead`: fixes of float16.
    """

    devices: tuple[str, ...]
    optimizer: OptimizerSpec = OptimizerSpec()
    dtype: str = "float32"
    autocast: str | None = None
    seed: int = 0
    unused: bool = False
    by_value: bool = False
    channels_last: bool = False
    compile: bool = False
    grad_scaler: bool = False
    cuda_graphs: bool = False
    instead: tuple[Fix, ...] = ()


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step. `peak_memory_bytes` has an entry for each device, or is None if the step was not metered. So
    has `reserved_memory_bytes`, what GPUs' allocators had taken for that; on CPUs it is None.

    `skipped` says why the optimizer left the step out, as it does for gradients that are not finite; None for any
    other step. `collectives` counts the calls of a device's collectives by kind, in engines that see them one by one.
    """

    loss: float
    step_time_s: float
    bytes_sent: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: list[int] | None = None
    skipped: Problem | None = None
    reserved_memory_bytes: list[int] | None = None
    collectives: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Activity:
    """What a training process is doing: `where` ("in the forward pass of micro-batch 3", "" if unknown) for `seconds`.
    `waits`: for messages of others, as far as it knows."""

    where: str = ""
    seconds: float = 0.0
    waits: bool = False


class Session(Protocol):
    """A model in training. An engine of several processes has one in each rank: its methods are collective, and
    results are complete on rank 0. Made before ranks are forked; what takes long is done when its context is entered.
    """

    plan: Plan
    module_names: Mapping[str, str]
    """Names of weights in the user's module, by those in the layers; empty where they are the same."""

    @property
    def pass_modules(self) -> nn.Module:
        """The modules that run in the passes of this process, with all copies of their weights: what passes leave in
        them is in checkpoints."""

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        """Forward, backward and one optimizer step on a global batch; `meter` counts memory (slower on CPU)."""

    def state_dict(self) -> dict[str, Any]:
        """Return {"model": ..., "optimizer": {name: {...}}, "step": steps done}, with the keys of the whole Sequential.

        An engine that scales its losses adds "loss_scale", which others ignore.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load weights, optimizer state and step from the `state_dict` of any engine."""

    def gradient_norms(self) -> dict[str, float]:
        """Return the norms of the gradients of the last step in this process, by names in the whole model.

        Those of shards have names that say so: "a shard of linear_0.weight".
        """

    def stage_of(self, name: str) -> int:
        """Return the stage of a gradient of this process, by the name that `gradient_norms` gives it."""

    def activity(self) -> Activity:
        """Return what this process is doing now. Called from another thread, for a process that hangs."""

    def trace(self) -> Trace:
        """The last steps, at most `harness.core.trace.KEPT_STEPS` of them."""


class ShardedSession(Session, Protocol):
    """A session in each of several ranks, of which each has a shard of the model."""

    def sharded_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return `state_dict` without what is sharded; and of that this rank's part, by the same names, as
        torch.distributed.checkpoint takes it: whole tensors, DTensors, `harness.runtime.state_shards.Blocks`.

        `load_state_dict` takes both together."""

    def empty_shards(self, keys: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return this rank's part of the same, for a checkpoint to be read into; `keys` are those of each parameter's
        optimizer state."""


class Engine(ABC):
    """Executes plans. Built from its own config; building and checking must not import torch.

    An engine says which order of operations it follows (`schedule`) and how it trains (`session`). By default it
    accepts every plan, has one stage on each device, and changes neither layers nor the optimizer's memory.
    """

    capabilities = Capabilities()

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """Return the problems that keep the engine from any plan for this request, as far as they need no profile.

        `dtype` is that of the weights ("float32"). Called before the model is profiled, and again for the mesh of the
        plan.
        """
        return []

    def refuses_layers(self, request: PlanRequest, profile: ModelProfile) -> list[Problem]:
        """Return the problems that the model's layers cause in every plan for this request: none has to be made
        then."""
        return []

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Return the problems that keep the engine from executing this plan, other than those of `refuses`."""
        return []

    def alternatives(self) -> dict[str, Fix]:
        """Return settings that are compared, by their names: each sets keys of this engine.

        They are a choice instead of a run, unless `picks_best`: then the fastest one that fits is run.
        """
        return {}

    picks_best = False
    may_recompute = False
    """Whether `ordered` may give plans recomputations, whatever the request says."""

    def ordered(
        self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, refused: Refused
    ) -> Plan:
        """Return the plan with `Plan.order`, for an engine that reads the order of tasks from a file or searches it.

        Called once, after `refuses` and `check`; what trains gets the result. An engine that moves layers between the
        plan's stages asks `refused` whether the model can be split so. Raises `ProblemError`.
        """
        return plan

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Return warnings about a plan that is executed all the same, for example settings without effect.

        `profile` is that of the model, before `layers` changes it.
        """
        return []

    @abstractmethod
    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        """Return the operations of a step, for the simulator and the trace; `harness.schedule.builders` has the usual
        schedules."""

    def placement(self, pipeline: int) -> tuple[int, ...]:
        """Return the device of each stage on `pipeline` devices; empty: one stage on each, in order."""
        return ()

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """Return the memory model of the optimizer, changed by what the engine shards or copies."""
        return model

    def copies(self, plan: Plan) -> tuple[int, ...]:
        """Return how many copies of its weights each stage of a plan keeps; (): as many as `memory` says."""
        return ()

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        """Return the profile, changed by what the engine recomputes inside a backward pass.

        Called after the plan is made; schedule and simulator use the result.
        """
        return profile

    @abstractmethod
    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        """Return a session that trains the model as planned, on devices of this machine."""
