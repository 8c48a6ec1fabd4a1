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
    """Global batch size: samples of one optimizer step, over all replicas."""
    micro_batches: int = 8
    """Micro-batches that each replica of the pipeline splits its samples into. Planners of tensor parallelism (autoddl,
    megatron, data_parallel, strategies, summa) set 1, unless it is given."""
    micro_batch_size: int | None = None
    """Samples of a micro-batch, in the place of batch.micro_batches, which is then the samples of each replica divided
    by it."""


@dataclass
class MeshConfig:
    """Parallel sizes of the device mesh; null: chosen from the number of devices."""

    data: int | None = None
    """Data parallel size: replicas of the model; null: chosen from the number of devices."""
    pipeline: int | None = None
    """Pipeline parallel size: stages of each replica; null: chosen from the number of devices."""
    tensor: int | None = None
    """Tensor parallel size: devices that share each matmul; null: chosen from the number of devices."""


@dataclass
class OptimizerConfig:
    name: str = "sgd"
    """The optimizer of torch.optim: sgd, adam, adamw, nadam (with decoupled weight decay), or muon, which updates
    matrices, AdamW all else, with the learning rate of AdamW."""
    lr: float = 0.1
    """Learning rate."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""
    nesterov: bool = False
    """Nesterov momentum of sgd."""
    beta1: float | None = None
    """Decay of the mean of gradients that adam, adamw and nadam keep (null: 0.9) or muon (null: 0.95)."""
    fused: bool = False
    """One kernel updates many weights (fused=True of torch.optim), in the place of one for each operation. DeepSpeed's
    own Adam (engine.offload) is fused anyway."""


@dataclass
class LaunchConfig:
    ranks: str = "auto"
    """Who starts the processes (ranks) of an engine. fork: they are forked on this machine. srun: one srun command
    starts them, on all nodes of the Slurm job. auto: srun inside of a Slurm job, else fork; where
    torchrun has started them, or with launch.hosts, nobody else does."""
    hosts: list[str] = field(default_factory=list)
    """Hosts on which the ranks are started over ssh, each with its number of ranks: [a:2,b:2]. Without a number a host
    has as many as cluster.devices, or as this machine has devices. The first one has rank 0, and all others reach it by
    its name. All share the file system and the code."""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
    """The command that runs a command line on one of launch.hosts: the host and the line follow it."""
    interface: str | None = None
    """Network interface (eth0, ib0) by which ranks reach each other, on each node the one of this name
    (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: NCCL's sockets, not InfiniBand; MPI chooses for itself). null: gloo takes
    that on which a node sees rank 0, NCCL chooses."""
    timeout_s: float | None = None
    """Seconds without progress after which a run is ended; the Python stacks of its ranks are written to the log. null:
    20 times the median step, at least 60 and at most 300; 300 before the first steps are done."""
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0: a checkpoint is written only when the run is preempted (SIGTERM, SIGUSR1,
    Ctrl-C)."""
    end_checkpoint: bool | None = None
    """Write a checkpoint after the last step, from which a run with more steps resumes. null: true if out is given and
    the run is not a point of a sweep."""
    sharded_checkpoints: bool = False
    """Each rank writes its own stage, or shard, of weights and optimizer state into a checkpoint, with
    torch.distributed.checkpoint, and reads it when the run resumes; false: rank 0 gathers all of them in its memory."""
    profiler: list[int] = field(default_factory=list)
    """Steps, numbered as in metrics.jsonl, of which torch.profiler writes a trace for each process into profiler/ of
    the run's folder (for Perfetto), on GPUs with a snapshot of memory. They take longer, and count as they are."""
    grace_s: float = 30.0
    """Seconds that a preempted run has to finish its step and write its checkpoint, before it is killed."""


@dataclass
class RaceConfig:
    minutes: float = 3.0
    """mode=race: minutes from the first round on after which no further round begins; starting the entries, one after
    the other, comes before. A race ends sooner once it is decided: when the 95 % interval of each entry's speed is
    narrower than 3 %."""


@dataclass
class TuneConfig:
    verify: int = 0
    """mode=tune: number of the best choices that train in turns on this machine, as with mode=race, once they are
    found. 0: none."""


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
    race: RaceConfig = field(default_factory=RaceConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    mode: str = "run"
    """run: plan, predict, train and record. plan: plan and predict, then stop. simulate: run the plan in a simulator
    and record it. profile: write the model's profile, then stop. calibrate: time collectives among this machine's
    devices, and write a cluster file with the fitted latency and bandwidth. tune: find the scheme (recomputation, ZeRO
    stage, schedule, planner), the mesh and the micro-batches that are fastest and fit in memory, of an engine, of
    several or of all (engine=all); keys that are given keep their values. race: train with each of several engines
    (engine=gpipe,ddp, or all) in turns, and rank them. fit: the memory of each scheme, with and without recomputation,
    in each precision."""
    costs: str = "auto"
    """Where layer times come from. measured: the profile as it is. scaled: a measured profile, scaled to the cluster's
    device. analytic: FLOPs and bytes divided by the device's peaks. none: layers take no time, so that only
    communication counts. auto: measured for this machine. For a described cluster, auto is: without profile=, analytic,
    or none where a tensor-parallel planner plans for a cluster without peaks; with the profile of another device,
    scaled if it was measured, else analytic."""
    jitter: float = 0.0
    """Simulation: relative standard deviation of each op's time (normal distribution, from `seed`); 0 is
    deterministic."""
    memory: str = "auto"
    """Bytes of memory for each parameter: auto (from the optimizer) or the name of a memory model
    (harness/core/memory_model.py)."""
    steps: int = 10
    """Training steps that are measured, after those of warmup; with mode=calibrate, rounds of all collectives; with
    mode=race, if it is given, the number of rounds."""
    warmup: int = 2
    """Training steps before the measured ones. Memory is measured in the last of them, if there are at least 2."""
    seed: int = 0
    """Seed of weights, data and dropout."""
    profile: str | None = None
    """A stored ModelProfile (JSON file), to plan and simulate with instead of profiling the model."""
    trace: str | None = None
    """mode=profile: a trace of torch.profiler (.json, .json.gz) that has the layers' times, on any device. Layers are
    distinguished by harness.annotate(model), called before the traced steps."""
    remeasure: bool = False
    """Measure this machine and the model's layers again, instead of reading the cached measurement."""
    export: str | None = None
    """mode=plan: a file that gets the plan for another system, which its suffix says. .json: DeepSpeed. .py: a script
    for torchrun, with torch.distributed.pipelining. .toml: torchtitan. .sh: Megatron-LM. What that system cannot
    express is refused; a file that is there is replaced with overwrite=true only."""
    out: str | None = None
    """The folder of the run; null: runs/<date>/<id>."""
    overwrite: bool = False
    """Replace training in the folder that is finished, or has other keys, and files of yours that have the names of a
    run's files. An unfinished run with the same keys is resumed all the same. Results of mode=plan, simulate, profile,
    calibrate and tune are always replaced, with a note if their keys were others."""


PRECISIONS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
"""The choice of `precision` that has a dtype for everything."""
DTYPES = tuple(PRECISIONS)
AUTOCAST = ("bfloat16", "float16")


@dataclass
class PrecisionConfig:
    """`precision=fp32`, with the keys of every precision."""

    name: str = "fp32"
    """Name of the precision in the record."""
    dtype: str = "float32"
    """Number format of weights, gradients, optimizer state and activations: float32, float64, bfloat16 or float16."""
    autocast: str | None = None
    """Number format of torch.autocast in the forward pass: bfloat16, float16 (small gradients become zero, unless
    precision.grad_scaler is true), or null for no autocast."""
    grad_scaler: bool = False
    """Losses are multiplied, and gradients divided, by a scale, so that gradients of activations do not vanish under
    autocast=float16. It begins at 65536, is halved in a step whose gradients overflow, which updates nothing, and
    doubled after 2000 steps without one (torch.amp.GradScaler)."""
    tf32: bool = False
    """GPUs multiply float32 numbers with the precision of TF32, in convolutions and in matmuls: several times as fast.
    false: neither does. (torch's own default is true for convolutions and false for matmuls.)"""
    channels_last: bool = False
    """Weights of two-dimensional convolutions have their channels last in memory (torch.channels_last), and so has what
    these compute: faster on GPUs with tensor cores in 16 bits, slower on many CPUs. Losses differ by rounding. Messages
    between devices are in the usual order."""
    cudnn_benchmark: bool = False
    """On GPUs the first convolution of each shape tries all of cuDNN's algorithms, and later ones take the fastest
    (torch.backends.cudnn.benchmark). Which one it is differs from run to run, and losses by their rounding."""
    compile: bool = False
    """torch.compile makes kernels of each layer's operations in the first step, which takes seconds for each kind of
    layer, and a C++ compiler, on GPUs Triton. Losses differ by rounding. Layers of torch.nn that stand alone, dropout
    and skips remain as they are. On CPUs the step in which memory is measured is not compiled."""
    cuda_graphs: bool = False
    """On GPUs CUDA graphs start the kernels of layers, in the place of Python: faster where these are short. They are
    captured in the first step (torch.cuda.make_graphed_callables): Python code of a layer runs then, and not again.
    Dropout and skips remain as they are. Profiles measure layers without graphs."""
