"""The deepspeed engine: DeepSpeed 0.19 itself.

With several stages its `PipelineModule` over the plan's stages, with or without replicas, and ZeRO 0 or 1; skips travel
through every stage as further tensors. With one stage its plain engine, with ZeRO 0 to 3. Nothing is clipped, no op is
compiled but for `offload`. DeepSpeed makes a backward pass for each tensor of a tuple; here one does for all. It trains
in float64 only in a pipeline without replicas, in bfloat16 and float16 only with ZeRO (float32 copies of the weights).
ZeRO's collectives run inside the passes; trace and schedule have them as blocks before and behind.

With ZeRO the optimizer steps float32 copies of the weights. These are what a state holds, so that it goes on exactly;
but in float16 the scale of the loss is found anew, and with `offload` DeepSpeed's own Adam goes on with powers of its
betas that may be a rounding off. With ZeRO a step whose gradients are not finite is skipped, as usual in float16, and
the log says so.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from engines.deepspeed.config import BUCKET, Config
from harness.cluster import Cluster
from harness.interfaces import Capabilities, Engine, Model, Session, SessionSpec
from harness.memory import DTYPE_BYTES, MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.deepspeed import deepspeed
from harness.schedule.hops import plan_hops
from harness.schedule.ties import plan_ties
from harness.schedule.zero import SHARDINGS, data_parallel

LIVE = 10**9
"""Elements of weights that ZeRO 3 keeps gathered at most (DeepSpeed's stage3_max_live_parameters)."""


class DeepSpeedEngine(Engine):
    """DeepSpeed's pipeline (zero 0 or 1), or with one stage its plain engine (zero 0 to 3)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.capabilities = Capabilities(
            dtypes=("float32", "float64", "bfloat16", "float16"), pipeline=config.zero < 2, data=True, ranks=True,
            because="" if config.zero < 2 else f"engine.zero={config.zero}",
        )  # fmt: skip

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        found = []
        zero, data, dtype = self.config.zero, plan.mesh.data, profile.dtype
        if dtype == "float64" and (data > 1 or zero):
            what = "sums no gradients in float64, and keeps shards in float32"
            found.append(Problem(f"precision.dtype {dtype}", f"DeepSpeed {what}", "precision=fp32"))
        if dtype in ("bfloat16", "float16") and zero == 0:
            what = "needs the float32 copy of the weights that ZeRO keeps, engine.zero is 0"
            found.append(Problem(f"precision.dtype {dtype}", what, "engine.zero=1"))
        if dtype == "float16" and cluster.cores:
            found.append(Problem(f"precision.dtype {dtype}", "DeepSpeed trains in it on GPUs only", "precision=bf16"))
        bare = [j for j, stage in enumerate(plan.stages) if not profile.parameter_bytes(stage.first, stage.last)]
        if zero and 0 < len(bare) < len(plan.stages):
            what = f"needs parameters in every stage, {len(bare)} of {len(plan.stages)} have none (stage {bare[0]})"
            found.append(Problem(f"engine.zero {zero}", what, "engine.zero=0, or other stages"))
        if self.config.offload and len(plan.stages) > 1:
            what = f"works without pipeline stages, there are {len(plan.stages)}"
            found.append(Problem("engine.offload true", what, "mesh.pipeline=1"))
        return found

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        m, data, zero = plan.micro_batches, plan.mesh.data, self.config.zero
        sizes = [profile.parameter_bytes(stage.first, stage.last) for stage in plan.stages]
        if len(plan.stages) == 1:
            return data_parallel(m, sizes[0], data, SHARDINGS[zero], plan.recompute, "all_reduce", reshard=False)
        order = {skip.name: number for number, skip in enumerate(profile.skips, start=1)}  # "" comes first
        hops = sorted(plan_hops(plan, profile, portals=False), key=lambda hop: (hop.target, order.get(hop.part, 0)))
        ties = plan_ties(plan, profile)
        devices = [stage.device for stage in plan.stages]
        return deepspeed(m, devices, hops, plan.recompute, ties, data, sizes, 1 if zero else 0,
                         "all_reduce")  # fmt: skip

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """As DeepSpeed allocates it, in multiples of the weights. Whatever lies in shards has a copy in float32.

        While gradients are summed a bucket holds them again, in a pipeline once more. With ZeRO 2 and 3 no more of
        them are there at once than a bucket holds; of ZeRO 3 `LIVE` weights, in between. What is offloaded lies in the
        host's memory.
        """
        zero, data, pipeline = self.config.zero, mesh.data, mesh.pipeline
        width = DTYPE_BYTES[profile.dtype]
        elements = profile.parameter_bytes(0, len(profile.layers) - 1) / width / pipeline
        bucket = min(1.0, BUCKET / elements) if elements and (data > 1 or zero) else 0.0
        if zero == 0 or not elements:
            return replace(model, gradients=model.gradients + bucket)
        copies = 2 if pipeline > 1 else 1
        shard = {2: 1 / data, 3: (1 - bucket) / data}.get(zero, 0.0)  # ZeRO 3 keeps it where the bucket was
        return replace(
            model,
            weights=1 / data + min(1.0, LIVE / elements) if zero == 3 else 1.0,
            gradients=(1 if zero == 1 else bucket) + copies * bucket + shard,
            optimizer=0.0 if self.config.offload else (1 + model.optimizer) * DTYPE_BYTES["float32"] / width / data,
        )

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        if len(plan.stages) == 1:
            from engines.deepspeed.replica import ReplicaSession

            return ReplicaSession(model, plan, spec, self.config)
        from engines.deepspeed.pipeline import PipelineSession

        return PipelineSession(model, plan, spec, self.config)
