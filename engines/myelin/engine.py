"""The myelin engine: stages run what has arrived, replicas sum their gradients while they update (Myelin, published
later as AxoNN).

    python run.py engine=myelin mesh.pipeline=2 mesh.data=2      G_inter x G_data in the paper's words, a rank for each

    stage 0   F0 F1 .. .. B0 F2 B1 F3 ..      whatever has arrived, by `engine.policy`; `engine.pipeline_limit` at once
    stage 1   .. F0 B0 F1 B1 .. F2 B2 ..      the last stage runs backward right after forward

What it cannot do:

* One stage on each device, no tensor parallelism inside a stage.
* Times of messages are differences of two ranks' clocks: right on one machine.
* On GPUs (untested) messages of transport=mpi pass through the host, unless MPI takes GPUs' memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from engines.myelin import config_warnings
from harness.core import activation_checkpointing
from harness.core.cluster import Cluster
from harness.core.memory_model import DTYPE_BYTES, MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import Problem
from harness.core.value_checks import one_of
from harness.interfaces import Capabilities, Engine, Model, PlanRequest, Searched, Session, SessionSpec
from harness.launch import mpi
from harness.schedule import Schedule
from harness.schedule.builders.myelin import ORDERS, Order, myelin, split_into_chunks
from harness.schedule.dependency_graph import COPIES
from harness.schedule.frozen_stages import without_frozen
from harness.schedule.policy import RULES, RuleName
from harness.schedule.tied_weight_ops import plan_ties
from harness.schedule.transfers import plan_transfers

TRANSPORTS = ("mpi", "torch")
POLICIES = tuple(rule for rule in RULES if rule != "in_order")
LARGEST = 2**40


@dataclass
class Config:
    DEGREES: ClassVar[dict[str, str]] = {"g_inter": "pipeline", "g_data": "data"}

    SEARCHED: ClassVar[dict[str, Searched]] = {
        "checkpoint_every": Searched(("never", "auto")),
        "order": Searched(ORDERS, "pipeline"),
    }

    ON_GPUS: ClassVar[dict[str, Any]] = {"transport": "torch"}

    name: str = "myelin"
    """The engine."""
    g_inter: int | None = None
    """The paper's name for mesh.pipeline."""
    g_data: int | None = None
    """The paper's name for mesh.data."""
    order: str = "message_driven"
    """Which task runs next. message_driven: a task whose message has arrived (Algorithms 1 and 2); 1f1b or gpipe: a
    fixed order, over the same transport."""
    policy: str = "fifo"
    """Which task a stage in the middle runs first where several are ready: fifo, forward_first, backward_first or
    alternate. The first stage sends a micro-batch in after each backward task, the last one goes back at once."""
    pipeline_limit: int | None = None
    """The most micro-batches that are in the pipeline at once; null: the number of stages."""
    transport: str = "mpi"
    """What sends messages between stages: mpi, or torch (torch.distributed), the default on GPUs (NCCL)."""
    checkpoint_every: str = "never"
    """Layers between two activation checkpoints: never, a number, or auto (the paper's rule)."""
    offload: bool = False
    """Keep float32 weights and optimizer state in the host's memory and copy them to the device bucket by bucket."""
    barrier: bool = False
    """Let all stages end their tasks before the first gradient is all-reduced, as in a measurement of phases."""
    bsize: int = 16_000_000
    """Number of parameters in a bucket."""
    k: int = 4
    """Number of buckets in a chunk. The gradients of a chunk are all-reduced while the optimizer steps the chunk
    before. 0: no overlap."""
    loss_scale: float | None = None
    """Loss scale in float16; null: dynamic loss scaling."""


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    known = {"order": ORDERS, "policy": POLICIES, "transport": TRANSPORTS}
    found = [one for key, values in known.items() for one in one_of(f"engine.{key}", getattr(config, key), values)]
    every = config.checkpoint_every
    if every not in ("never", "auto") and not (every.isdecimal() and 0 < int(every) < LARGEST):
        message = "is neither never, auto nor a number of layers"
        found.append(Problem("engine.checkpoint_every", every, message, ({"engine.checkpoint_every": "auto"},)))
    for key, least in (("pipeline_limit", 1), ("bsize", 1), ("k", 0)):
        value, default = getattr(config, key), getattr(Config(), key)
        if value is not None and not least <= value < LARGEST:
            message = f"must be from {least} to {LARGEST - 1}"
            found.append(Problem(f"engine.{key}", value, message, ({f"engine.{key}": default},)))
    if config.loss_scale is not None and not 0 < config.loss_scale < float("inf"):
        message = "must be above 0 and finite"
        found.append(Problem("engine.loss_scale", config.loss_scale, message, ({"engine.loss_scale": None},)))
    return found


def build(config: Config) -> MyelinEngine:
    return MyelinEngine(config)


DTYPES = ("float32", "float64", "bfloat16", "float16")
HERE = "local"
STATE = {"float64": 8}
"""Bytes of a number of the optimizer, which has float32 otherwise."""


class MyelinEngine(Engine):
    def __init__(self, config: Config) -> None:
        self.config = config
        self.capabilities = Capabilities(
            dtypes=DTYPES,
            optimizers=("sgd", "adam", "adamw"),  # on slices of flat buffers
            data=True,
            multi_process=True,
            mpi=config.transport == "mpi",
            changed_weights=False,  # flat buffers have them, and masters in half precision
            complex=False,
            complex_weights=False,
            integer_weights=False,
            same_memory=False,
            channels_last=False,
            compiled=True,
            sharded_checkpoints=True,
        )

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        """Report settings that cannot start on this machine; plans and simulations for described clusters need no
        MPI."""
        here = self.capabilities.mpi and cluster.name == HERE
        return mpi.problems("engine.transport", "mpi", instead="torch") if here else []

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Stages in other places than one on each device; a plan that says itself what is recomputed."""
        devices = [stage.device for stage in plan.stages]
        wanted = list(range(plan.mesh.pipeline))
        found = []
        if devices != wanted:
            message = f"places its stages on devices {_listed(devices)}, engine=myelin on {_listed(wanted)}"
            found.append(Problem("planner", None, message, ({"planner": "balance"}, {"planner": "contiguous"})))
        if plan.recompute != "never":
            message = f"asks to recompute {plan.recompute} whole stages, engine=myelin recomputes segments of them"
            found.append(Problem("planner", None, message, ({"engine.checkpoint_every": "auto"},)))
        return found

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Settings that do nothing, or only cost time, and how the paper's formula was read."""
        read = self.config.checkpoint_every == "auto"
        return [
            *config_warnings.idle(self.config, plan, profile, cluster, memory),
            *([config_warnings.interpretations(plan)] if read else []),
            *config_warnings.wasted(self.config, plan, profile),
            *config_warnings.through_the_host(self.config, plan, cluster),
        ]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        config, width = self.config, DTYPE_BYTES[profile.dtype]
        ties = plan_ties(plan, profile, COPIES)
        sizes = [profile.trained_bytes(stage.first, stage.last) // width for stage in plan.stages]
        tied = [sum(tie.bytes for tie in ties if j in tie.stages) // width for j in range(len(sizes))]
        found = myelin(
            plan.micro_batches,
            [stage.device for stage in plan.stages],
            plan_transfers(plan, profile, portals=True),
            cast(Order, config.order),
            cast(RuleName, config.policy),
            config.pipeline_limit,
            ties,
            plan.mesh.data,
            [
                split_into_chunks(elements, width, config.bsize, config.k, config.offload, shared)
                for elements, shared in zip(sizes, tied, strict=True)
            ],
            config.k > 0,
            config.barrier,
        )
        return without_frozen(found, plan, profile)

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """With Adam in half precision a parameter takes 20 bytes: 2 + 2 for weight and gradient, 4 + 4 for both in
        float32, 8 for moments. With offloading it takes 4, plus buckets of 16 bytes for each of `bsize` parameters
        (Myelin, section V-B)."""
        model = replace(model, messages="posted", flat=True)
        width, moments = DTYPE_BYTES[profile.dtype], model.optimizer
        state, half = STATE.get(profile.dtype, 4), profile.dtype in ("float16", "bfloat16")
        if self.config.offload:
            each = state * (2 + moments)
            return replace(
                model,
                optimizer=0.0,
                offloaded=state * (1 + moments) / width,
                bucketed=each / width,
                buckets_bytes=round(self.config.bsize * each),
            )
        return replace(model, optimizer=state * (2 + moments) / width) if half else model

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        return activation_checkpointing.checkpointed(profile, plan, self.config.checkpoint_every)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.myelin.session import MyelinSession

        return MyelinSession(model, plan, spec, self.config, self.schedule)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
