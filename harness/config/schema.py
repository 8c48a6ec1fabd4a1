"""The root of the configuration. Engines, planners, models, data sets and trackers bring their own groups.

The number formats of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class BatchConfig:
    size: int = 16
    """Samples of one optimizer step, over all replicas."""
    micro_batches: int = 8
    """Micro-batches of each pipeline replica."""


@dataclass
class MeshConfig:
    """Degrees of parallelism; one that is null follows from the devices."""

    data: int | None = None
    """Replicas."""
    pipeline: int | None = None
    """Pipeline stages."""
    tensor: int | None = None
    """Tensor shards."""


@dataclass
class OptimizerConfig:
    name: str = "sgd"
    """sgd, adam or adamw (torch.optim)."""
    lr: float = 0.1
    """Learning rate."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""


@dataclass
class LaunchConfig:
    ranks: str = "auto"
    """Who starts an engine's ranks. fork: they are forked here. srun: by one srun command, on all nodes of the Slurm
    job that this is part of. auto: srun inside of a Slurm job, else fork."""
    timeout_s: float = 300.0
    """A rank that makes no progress for so long is ended, its Python stacks go to the log."""
    checkpoint_every: int = 0
    """Steps from one checkpoint to the next; 0: only when the run is preempted (SIGTERM, SIGUSR1, Ctrl-C)."""
    grace_s: float = 30.0
    """A run that is preempted is ended after so long, if its step and the checkpoint take longer."""


@dataclass
class Config:
    """`python run.py key=value ...`"""

    defaults: list[Any] = field(default_factory=lambda: ["_self_"])
    engine: Any = MISSING
    model: Any = MISSING
    planner: Any = MISSING
    data: Any = MISSING
    cluster: Any = MISSING
    precision: Any = MISSING
    tracker: Any = MISSING
    batch: BatchConfig = field(default_factory=BatchConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    mode: str = "run"
    """run: plan, predict, train, record. plan: stop after the prediction. simulate: record the simulated run, too.
    profile: write the model's profile, and stop. calibrate: time collectives among this machine's devices, and write a
    cluster file with the latency and bandwidth that fit them. tune: which mesh of all devices and which micro-batches
    are fastest and fit; what is given of mesh.* and batch.micro_batches stays."""
    costs: str = "auto"
    """Where layer times are from. measured: the profile as it is. scaled: a measured profile, scaled to the cluster's
    device. analytic: counted work against the device's peaks. none: layers take no time, what is left is communication
    (auto is that where a planner of matrix products plans for a cluster without peaks). auto: measured here, or as the
    profile has them; on a described cluster with peaks analytic without profile=, and with a profile of another device
    scaled if it was measured there, analytic if its times are."""
    jitter: float = 0.0
    """Simulation: relative spread of each op's time (normal, from `seed`); 0 is deterministic."""
    memory: str = "auto"
    """Bytes for each parameter: auto (from the optimizer) or the name of a memory model
    (harness/core/memory_model.py)."""
    steps: int = 10
    """Training steps that are measured; with mode=calibrate rounds of all collectives."""
    warmup: int = 2
    """Steps before them; memory is metered in the last one, if it is not the first (then it is not known)."""
    seed: int = 0
    """Seeds weights, data and dropout."""
    profile: str | None = None
    """A stored ModelProfile (JSON), measured or counted, to plan and simulate with instead of profiling."""
    remeasure: bool = False
    """Measures this machine and the model's layers again. Otherwise both are measured once and kept, even if other
    programs were running then."""
    out: str | None = None
    """The run's folder; runs/<date>/<id> where it is not given."""


DTYPES = ("float32", "float64", "bfloat16", "float16")
AUTOCAST = ("bfloat16", "float16")


@dataclass
class PrecisionConfig:
    """`precision=fp32`, with the keys of every precision."""

    name: str = "fp32"
    """What the record calls it."""
    dtype: str = "float32"
    """Format of weights, gradients, optimizer state and activations: float32, float64, bfloat16 or float16."""
    autocast: str | None = None
    """Format that torch.autocast computes the forward pass in: bfloat16, float16 or null for none."""
