"""The deepspeed engine: DeepSpeed 0.19 itself.

With several stages its `PipelineModule` over the plan's stages, with or without replicas, and ZeRO 0 or 1; skips travel
through every stage as further tensors. With one stage its plain engine, with ZeRO 0 to 3. Nothing is clipped, no op is
compiled but for `offload`. DeepSpeed makes a backward pass for each tensor of a tuple; here one does for all. It trains
in float64 only in a pipeline without replicas, in bfloat16 and float16 only with ZeRO (float32 copies of the weights).
ZeRO's collectives run inside the passes; trace and schedule have them as blocks before and behind.

On described clusters it is the Megatron-LM of papers, too, which is planned and simulated only: a stage's devices split
its products (mesh.tensor, planner=megatron planner.dimensions=1), `checkpoint=always` then computes layer by layer
again instead of whole stages, and half precision needs no ZeRO. With zero=0 it is Megatron-LM, with zero=1 what papers
call DeepSpeed: the same with the optimizer in shards, to whose owners gradients go by a reduce-scatter, as in the paper
and in DeepSpeed then (0.19 sums them for everybody).

With ZeRO the optimizer steps float32 copies of the weights. These are what a state holds, in float16 with the scale of
the loss, so that it goes on exactly; but with `offload` DeepSpeed's own Adam goes on with powers of its betas that may
be a rounding off. With ZeRO a step whose gradients are not finite is skipped, as usual in float16, and the log says so.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from engines.deepspeed.config import BUCKET, Config
from harness import checkpointing
from harness.cluster import Cluster
from harness.engine_check import unsplit
from harness.interfaces import Capabilities, Engine, Model, PlanRequest, Session, SessionSpec, Setting
from harness.memory import DTYPE_BYTES, MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.deepspeed import deepspeed
from harness.schedule.hops import plan_hops
from harness.schedule.tensor import with_traffic
from harness.schedule.ties import plan_ties
from harness.schedule.zero import SHARDINGS, Reduction, data_parallel

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
            dtypes=("float32", "float64", "bfloat16", "float16"), pipeline=config.zero < 2, data=True, ranks=True,
            tensor=True, elsewhere=("tensor",),
            optimizers=("adamw", "adam") if config.offload else Capabilities.optimizers,
            because={
                "tensor": Setting("cluster=local", "mode=simulate cluster=summit"),
                "pipeline": Setting(f"engine.zero={config.zero}", "engine.zero=1"),
                "optimizers": Setting("engine.offload=true", "engine.offload=false"),
            },
        )  # fmt: skip

    def refuses(self, request: PlanRequest, dtype: str, cluster: Cluster) -> list[Problem]:
        found, key = [], f"precision.dtype {dtype}"
        zero, data = self.config.zero, request.data
        if dtype == "float64" and (data > 1 or zero):
            what = "DeepSpeed sums no gradients in float64, and keeps shards in float32"
            whole = [*(["engine.zero=0"] if zero else []), *(["mesh.data=1"] if data > 1 else [])]
            found.append(Problem(key, what, f"precision=fp32, or {' '.join(whole)}"))
        if dtype == "float16" and cluster.cores:
            found.append(Problem(key, "DeepSpeed trains in it on GPUs only", f"precision={'bf16' if zero else 'fp32'}"))
        elif dtype in HALF and zero == 0 and cluster.name == HERE:
            what = "needs the float32 copy of the weights that ZeRO keeps, engine.zero is 0"
            found.append(Problem(key, what, "engine.zero=1"))
        if self.config.offload and request.pipeline > 1:
            what = f"works without pipeline stages, there are {request.pipeline}"
            found.append(Problem("engine.offload true", what, "mesh.pipeline=1"))
        return found

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        zero = self.config.zero
        if found := unsplit(plan, "deepspeed"):
            return found
        if len(plan.stages) > len(plan.devices):
            devices = ", ".join(str(stage.device) for stage in plan.stages)
            what = f"has several stages on a device ({devices}), DeepSpeed one on each"
            return [Problem("the plan", what, "planner=contiguous, or engine=gpipe")]
        bare = [j for j, stage in enumerate(plan.stages) if not profile.parameter_bytes(stage.first, stage.last)]
        if not zero or not 0 < len(bare) < len(plan.stages):
            return []
        what = f"needs parameters in every stage, {len(bare)} of {len(plan.stages)} have none (stage {bare[0]})"
        return [Problem(f"engine.zero {zero}", what, "engine.zero=0, or other stages")]

    def notes(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[Problem]:
        if not self.config.zero or plan.mesh.data > 1:
            return []
        shared = "mesh.data=2" if cluster.devices >= 2 * plan.mesh.size else "mesh.data=2 mesh.pipeline=1"
        mend = shared if cluster.devices > 1 else "cluster.devices=2 mesh.data=2"
        return [Problem(f"engine.zero {self.config.zero}", "one replica: nothing to shard", mend)]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        return with_traffic(self._without_traffic(plan, profile), plan)

    def _without_traffic(self, plan: Plan, profile: ModelProfile) -> Schedule:
        m, data, zero = plan.micro_batches, plan.mesh.data, self.config.zero
        recompute = "never" if _by_layer(plan) else plan.recompute
        reduction: Reduction = "reduce_scatter" if plan.mesh.tensor > 1 else "all_reduce"
        sizes = [profile.parameter_bytes(stage.first, stage.last) for stage in plan.stages]
        if len(plan.stages) == 1:
            return data_parallel(m, sizes[0], data, SHARDINGS[zero], recompute, reduction, reshard=False)
        order = {skip.name: number for number, skip in enumerate(profile.skips, start=1)}  # "" comes first
        hops = sorted(plan_hops(plan, profile, portals=False), key=lambda hop: (hop.target, order.get(hop.part, 0)))
        ties = plan_ties(plan, profile)
        devices = [stage.device for stage in plan.stages]
        return deepspeed(m, devices, hops, recompute, ties, data, sizes, 1 if zero else 0, reduction)

    def layers(self, plan: Plan, profile: ModelProfile) -> ModelProfile:
        return checkpointing.checkpointed(profile, plan, "1") if _by_layer(plan) else profile

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """As DeepSpeed allocates it, in multiples of the weights. Whatever lies in shards has a copy in float32.

        While gradients are summed a bucket holds them again; with ZeRO 1 and 2 there are two of them then, one from the
        backward pass on. With ZeRO 2 and 3 no more gradients are there at once than a bucket holds, beside the shard;
        of ZeRO 3 `LIVE` weights, in between, of which `GATHERED` lie in the buffer that they arrive in, too. What is
        offloaded lies in the host's memory. Without ZeRO half precision keeps weights and gradients in float32, too
        (Megatron-LM).
        """
        model = replace(model, messages="copied" if mesh.pipeline > 1 else "passing")
        zero, data, width = self.config.zero, mesh.data, DTYPE_BYTES[profile.dtype]
        elements = profile.parameter_bytes(0, len(profile.layers) - 1) / width / (mesh.pipeline * mesh.tensor)
        bucket = min(1.0, BUCKET / elements) if elements and (data > 1 or zero) else 0.0
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
            from engines.deepspeed.replica import ReplicaSession

            return ReplicaSession(model, plan, spec, self.config)
        from engines.deepspeed.pipeline import PipelineSession

        return PipelineSession(model, plan, spec, self.config)


def _by_layer(plan: Plan) -> bool:
    """Whether layers are computed again one by one, as Megatron-LM's are."""
    return plan.mesh.tensor > 1 and plan.recompute == "always"
