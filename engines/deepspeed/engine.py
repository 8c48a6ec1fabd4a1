"""The deepspeed engine: DeepSpeed 0.19 itself.

With several stages its `PipelineModule` over the plan's stages, with or without replicas, and ZeRO 0 or 1; skips travel
through every stage as further tensors. With one stage its plain engine, with ZeRO 0 to 3. Nothing is clipped, no op is
compiled but for `offload`. DeepSpeed makes a backward pass for each tensor of a tuple; here one does for all. It trains
in float64 only in a pipeline without replicas, in bfloat16 and float16 only with ZeRO (float32 copies of the weights).
ZeRO's collectives run inside the passes; trace and schedule have them as blocks before and after.

On described clusters it is the Megatron-LM of papers, too, which is planned and simulated only: a stage's devices split
its matmuls (mesh.tensor, planner=megatron planner.dimensions=1), `checkpoint=always` then computes layer by layer
again instead of whole stages, and half precision needs no ZeRO. With zero=0 it is Megatron-LM, with zero=1 what papers
call DeepSpeed: the same with the optimizer in shards, to whose owners gradients go by a reduce-scatter, as in the paper
and in DeepSpeed then (0.19 sums them for everybody).

With ZeRO the optimizer steps float32 copies of the weights. These are what a state holds, in float16 with the scale of
the loss, so that it continues exactly; but with `offload` DeepSpeed's own Adam continues with powers of its betas that
may be a rounding off. With ZeRO a step whose gradients are not finite is skipped, as usual in float16, and the log
says so.
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import ClassVar

from engines.deepspeed import BUCKET
from harness.checks.engine_support import unsplit
from harness.checks.values import not_installed
from harness.core import activation_checkpointing
from harness.core.cluster import Cluster
from harness.core.memory_model import DTYPE_BYTES, MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import Fix, Problem
from harness.core.value_checks import one_of
from harness.interfaces import Capabilities, Engine, Model, PlanRequest, Searched, Session, SessionSpec, Setting
from harness.schedule import Schedule
from harness.schedule.builders.data_parallel import SHARDINGS, Reduction, data_parallel
from harness.schedule.builders.deepspeed import deepspeed
from harness.schedule.builders.tensor_parallel import with_traffic
from harness.schedule.frozen_stages import without_frozen
from harness.schedule.tied_weight_ops import plan_ties
from harness.schedule.transfers import plan_transfers

VERSION = "0.19"
"""The only supported version: our workarounds patch DeepSpeed's internals, which may differ in others."""
STAGES = (0, 1, 2, 3)
CHECKPOINT = ("never", "always")


@dataclass
class Config:
    PLANNERS: ClassVar[tuple[str, ...]] = ("balance", "megatron")
    SEARCHED: ClassVar[dict[str, Searched]] = {"zero": Searched(STAGES), "checkpoint": Searched(CHECKPOINT)}

    name: str = "deepspeed"
    """The engine."""
    zero: int = 0
    """ZeRO stage: what is sharded over the replicas. 0: nothing, 1: optimizer state, 2: gradients too, 3: weights too.
    2 and 3 need mesh.pipeline=1; 0 in half precision runs as Megatron-LM, for described clusters only."""
    checkpoint: str = "never"
    """Which micro-batches are recomputed in the backward pass: never or always. A stage is recomputed as a whole; with
    mesh.tensor above 1 (described clusters only) layer by layer."""
    offload: bool = False
    """ZeRO-Offload: optimizer state and optimizer step are on the CPU (zero=1 to 3, adam or adamw). The first run
    compiles DeepSpeed's cpu_adam, which takes minutes: set launch.timeout_s=1800 on a busy machine."""


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    found = not_installed("deepspeed", "deepspeed", "pip install 'deepspeed>=0.19,<0.20'", VERSION)
    found += one_of("engine.zero", config.zero, STAGES, min(max(config.zero, 0), 3))
    found += one_of("engine.checkpoint", config.checkpoint, CHECKPOINT, "always")
    if config.offload and config.zero == 0:
        message = "needs the optimizer's state in shards, engine.zero is 0"
        found.append(Problem("engine.offload", True, message, ({"engine.zero": 1}, {"engine.offload": False})))
    if config.offload and (missing := _missing_tools()):
        message = f"compiles cpu_adam, and there is no {' and no '.join(missing)}"
        commands = " and ".join(missing.values())
        found.append(Problem("engine.offload", True, message, ({"engine.offload": False},), commands))
    return found


def _missing_tools() -> dict[str, str]:
    """Return the tools that torch needs to compile ops and this machine lacks, each with the command that installs
    it."""
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    missing = {}
    if shutil.which(compiler) is None:
        missing[f"C++ compiler ({compiler})"] = "apt-get install g++"
    if shutil.which("ninja") is None and find_spec("ninja") is None:
        missing["ninja"] = "pip install ninja"
    return missing


def build(config: Config) -> DeepSpeedEngine:
    return DeepSpeedEngine(config)


HERE = "local"
"""The cluster that things run on."""
HALF = ("bfloat16", "float16")
LIVE = 10**9
"""Elements of weights that ZeRO 3 keeps gathered at most (DeepSpeed's stage3_max_live_parameters)."""
GATHERED = 50_000_000
"""Elements that it gathers at once (stage3_prefetch_bucket_size)."""


class DeepSpeedEngine(Engine):
    """DeepSpeed's pipeline (zero 0 or 1), or with one stage its plain engine (zero 0 to 3)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.capabilities = Capabilities(
            dtypes=("float32", "float64", "bfloat16", "float16"),
            pipeline=config.zero < 2,
            data=True,
            multi_process=True,
            changed_weights=config.zero == 0,
            complex=False,
            complex_weights=config.zero == 0,
            strided_weights=False,
            channels_last=False,
            same_memory=config.zero == 0,
            sparse=config.zero == 0,
            scalars=False,
            sharded_checkpoints=True,
            tensor=True,
            simulated_only=("tensor",),
            optimizers=("adamw", "adam") if config.offload else ("sgd", "adam", "adamw"),
            disabled_by={
                "tensor": Setting({"cluster": "local"}, {"mode": "simulate", "cluster": "summit"}),
                "pipeline": Setting({"engine.zero": config.zero}, {"engine.zero": 1}),
            }
            | ({"optimizers": Setting({"engine.offload": True}, {"engine.offload": False})} if config.offload else {}),
        )

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        found, key = [], "precision.dtype"
        zero, data = self.config.zero, request.data
        if dtype == "float64" and (data > 1 or zero or request.pipeline == 1):
            message = (
                "is supported in a pipeline alone, without ZeRO and replicas: else DeepSpeed all-reduces in float32"
            )
            found.append(Problem(key, dtype, message, ({key: "float32"}, *self._as_pipeline(request))))
        if dtype == "float16" and cluster.cores:
            other = "bfloat16" if zero else "float32"
            found.append(Problem(key, dtype, "needs GPUs in DeepSpeed, these devices are CPUs", ({key: other},)))
        elif dtype in HALF and zero == 0 and cluster.name == HERE:
            message = "needs the float32 copy of the weights that ZeRO keeps, engine.zero is 0"
            found.append(Problem(key, dtype, message, ({"engine.zero": 1},)))
        if self.config.offload and request.pipeline > 1:
            message = f"needs 1 pipeline stage, there are {request.pipeline}"
            found.append(Problem("engine.offload", True, message, ({"mesh.pipeline": 1},)))
        return found

    def _as_pipeline(self, request: PlanRequest) -> list[Fix]:
        """What makes it one pipeline without ZeRO, if these devices and layers can be one."""
        devices = request.pipeline * request.data
        stages = min(devices, request.layers or devices)
        needed = {
            "engine.zero": (0, self.config.zero > 0),
            "mesh.data": (1, request.data > 1),
            "mesh.pipeline": (stages, request.pipeline == 1),
        }
        return [{key: value for key, (value, differs) in needed.items() if differs}] if stages > 1 else []

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        zero = self.config.zero
        if found := unsplit(plan, "deepspeed"):
            return found
        if len(plan.stages) > len(plan.devices):
            devices = ", ".join(str(stage.device) for stage in plan.stages)
            message = f"places several stages on a device ({devices}), DeepSpeed has one on each"
            return [Problem("planner", None, message, ({"planner": "contiguous"}, {"engine": "gpipe"}))]
        bare = [j for j, stage in enumerate(plan.stages) if not profile.trained_bytes(stage.first, stage.last)]
        if not zero or not 0 < len(bare) < len(plan.stages):
            return []
        message = (
            f"needs trained parameters in every stage, {len(bare)} of {len(plan.stages)} have none (stage {bare[0]})"
        )
        return [Problem("engine.zero", zero, message, ({"engine.zero": 0},), "other stages")]

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        zero = self.config.zero
        copies = self.config.offload or profile.dtype in ("bfloat16", "float16")  # ZeRO is there for another reason
        if not zero or plan.mesh.data > 1 or copies:
            return []
        fix: Fix = {"engine.zero": 0}
        if zero > 1:  # else there would be as many stages as devices
            fix |= {"mesh.pipeline": plan.mesh.pipeline}
        return [Problem("engine.zero", zero, "has nothing to shard, there is 1 replica", (fix,))]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        return with_traffic(self._without_traffic(plan, profile), plan)

    def _without_traffic(self, plan: Plan, profile: ModelProfile) -> Schedule:
        m, data, zero = plan.micro_batches, plan.mesh.data, self.config.zero
        recompute = "never" if _by_layer(plan) else plan.recompute
        reduction: Reduction = "reduce_scatter" if plan.mesh.tensor > 1 else "all_reduce"
        sizes = [profile.trained_bytes(stage.first, stage.last) for stage in plan.stages]
        if len(plan.stages) == 1:
            size = profile.parameter_bytes()
            frozen = size - sizes[0]
            return data_parallel(
                m, size, data, SHARDINGS[zero], recompute, reduction, reshard=False, frozen_bytes=frozen
            )
        order = {skip.name: number for number, skip in enumerate(profile.skips, start=1)}  # "" comes first
        transfers = sorted(
            plan_transfers(plan, profile, portals=False),
            key=lambda transfer: (transfer.target, order.get(transfer.part, 0)),
        )
        ties = plan_ties(plan, profile)
        devices = [stage.device for stage in plan.stages]
        found = deepspeed(m, devices, transfers, recompute, ties, data, sizes, 1 if zero else 0, reduction)
        return without_frozen(found, plan, profile, messages=False)

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        return activation_checkpointing.checkpointed(profile, plan, "1") if _by_layer(plan) else profile

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """Memory as DeepSpeed allocates it, in multiples of the weights. Sharded tensors have a float32 copy.

        While gradients are summed a bucket holds them again; with ZeRO 1 and 2 there are two of them then, one from the
        backward pass on. With ZeRO 2 and 3 no more gradients are there at once than a bucket holds, next to the shard;
        of ZeRO 3 `LIVE` weights, in between, of which `GATHERED` are in the receive buffer, too. Offloaded
        tensors are in the host's memory. Without ZeRO half precision keeps weights and gradients in float32, too
        (Megatron-LM).
        """
        model = replace(model, messages="copied" if mesh.pipeline > 1 else "passing")
        zero, data, width = self.config.zero, mesh.data, DTYPE_BYTES[profile.dtype]
        parts = width * mesh.pipeline * mesh.tensor
        elements, trained = profile.parameter_bytes() / parts, profile.trained_bytes() / parts
        bucket = min(1.0, BUCKET / trained) if trained and (data > 1 or zero) else 0.0
        if zero == 0 and profile.dtype in HALF:
            model = replace(model, optimizer=(2 + model.optimizer) * DTYPE_BYTES["float32"] / width)
        if zero == 0 or not elements:
            return replace(model, reducing=bucket)
        gathered = min(1.0, LIVE / elements) + min(1.0, GATHERED / elements)
        shard = 1 / data if zero > 1 else 0.0
        return replace(
            model,
            weights=1 / data + gathered if zero == 3 else 1.0,
            gradients=bucket + (1.0 if zero == 1 else shard),
            reducing=bucket + shard if zero < 3 else 0.0,
            optimizer=0.0 if self.config.offload else (1 + model.optimizer) * DTYPE_BYTES["float32"] / width / data,
        )

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        if len(plan.stages) == 1:
            from engines.deepspeed.replica_session import ReplicaSession

            return ReplicaSession(model, plan, spec, self.config)
        from engines.deepspeed.pipeline_session import PipelineSession

        return PipelineSession(model, plan, spec, self.config)


def _by_layer(plan: Plan) -> bool:
    """Whether layers are computed again one by one, as Megatron-LM's are."""
    return plan.mesh.tensor > 1 and plan.recompute == "always"
